"""The definitions of custom resources (CRDs) as their projects publish them, read strictly.

An API server drops a field that a definition lacks, without a word. Here it is an error. Rules in
CEL (``x-kubernetes-validations``) are not evaluated; all of ours compare with an earlier resource.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import yaml
from jsonschema import Draft4Validator

GITHUB = "https://raw.githubusercontent.com"
KUBERAY = f"{GITHUB}/ray-project/kuberay/v1.7.1/helm-chart/kuberay-operator/crds"
KSERVE = f"{GITHUB}/kserve/kserve/v0.21.0/config/crd/full"
PROMETHEUS = f"{GITHUB}/prometheus-operator/prometheus-operator/v0.93.1/example"
PUBLISHED = {
    "RayService": f"{KUBERAY}/ray.io_rayservices.yaml",
    "RayJob": f"{KUBERAY}/ray.io_rayjobs.yaml",
    "ServingRuntime": f"{KSERVE}/serving.kserve.io_servingruntimes.yaml",
    "InferenceService": f"{KSERVE}/serving.kserve.io_inferenceservices.yaml",
    "PodMonitor": f"{PROMETHEUS}/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    "PrometheusRule": (
        f"{PROMETHEUS}/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml"
    ),
}
WITHIN_S = 30.0
OPEN = ("x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource")


class UnreachableError(Exception):
    """Nobody answers at a definition's address."""


def fetch(url: str) -> str:
    """Return the text at an address.

    Raises:
        UnreachableError: no connection.
        httpx.HTTPStatusError: an answer, but not the file: the address is wrong.

    """
    try:
        answer = httpx.get(url, timeout=WITHIN_S, follow_redirects=True)
    except httpx.TransportError as error:
        raise UnreachableError(f"{url}: {error}") from error
    return answer.raise_for_status().text


def mistakes(definition: str, document: Mapping[str, Any]) -> list[str]:
    """Return what an API server with this definition refuses or drops; a line for each.

    Raises:
        ValueError: the definition is of another kind, or serves no such version.

    """
    content = yaml.safe_load(definition)
    group, _, version = document["apiVersion"].partition("/")
    spec = content["spec"]
    served = {v["name"]: v for v in spec["versions"] if v["served"]}
    if (spec["group"], spec["names"]["kind"]) != (group, document["kind"]) or version not in served:
        defined = f"{spec['group']}/{', '.join(served)} {spec['names']['kind']}"
        asked = f"{document['apiVersion']} {document['kind']}"
        raise ValueError(f"the definition is of {defined}, the document a {asked}")
    schema = _strict(served[version]["schema"]["openAPIV3Schema"])
    schema["properties"] |= {"metadata": {"type": "object"}}  # every resource's own
    errors = Draft4Validator(schema).iter_errors(document)
    return sorted(f"{error.json_path}: {error.message[:200]}" for error in errors)


def _strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with unknown fields forbidden, in the words of JSON schema."""
    strict = dict(_without_dialect(schema))
    if "properties" in schema:
        strict["properties"] = {key: _strict(part) for key, part in schema["properties"].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), Mapping):
            strict[name] = _strict(schema[name])
    is_object = schema.get("type") == "object" and "additionalProperties" not in schema
    if is_object and not any(schema.get(name) for name in OPEN):
        strict["additionalProperties"] = False
    return {"anyOf": [strict, {"type": "null"}]} if schema.get("nullable") else strict


def _without_dialect(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schema's words without patterns that Go has and Python does not."""
    for key, value in schema.items():
        if key == "pattern":
            try:
                re.compile(value)
            except re.error:
                continue
        yield key, value
