"""configs/kubernetes against the definitions that KubeRay, KServe and Prometheus' operator publish.

These are fetched: where no network answers the tests are skipped and say so. test_kubernetes.py
checks the same resources without one, against fields listed in tests/support/custom_resources.py
and KServe's SDK. How definitions are fetched and read is checked here with one of our own.
"""

import copy
import re
from typing import Any

import httpx
import pytest
import yaml

from tests.support.cases import cases
from tests.support.http_server import FakeServer
from tests.support.manifests import FOLDERS, rendered
from tests.support.published_resources import PUBLISHED, UnreachableError, fetch, mistakes

DURATION = r"^([0-9]+(ms|s|m))+$"
TEXT = {"type": "string"}
PART = {"type": "object", "properties": {"name": TEXT}}
SPEC: dict[str, Any] = {
    "type": "object",
    "required": ["size"],
    "properties": {
        "size": {"type": "integer", "minimum": 1},
        "interval": {"type": "string", "pattern": DURATION},
        "strategy": {"type": "string", "pattern": "^(?i)(abort|warn)?$"},  # Go's, not Python's
        "colour": {"type": "string", "enum": ["red", "blue"]},
        "limit": {"anyOf": [{"type": "integer"}, TEXT]},
        "note": {"type": "string", "nullable": True},
        "labels": {"type": "object", "additionalProperties": TEXT},
        "raw": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "empty": {"type": "object"},
        "parts": {"type": "array", "items": PART},
    },
}
TOP = {"apiVersion": TEXT, "kind": TEXT, "metadata": {"type": "object"}}
VERSIONS = [
    ("v1alpha1", False, SPEC),
    ("v1", True, {"type": "object", "properties": TOP | {"spec": SPEC}}),
]
LISTED = [
    {"name": name, "served": is_served, "schema": {"openAPIV3Schema": schema}}
    for name, is_served, schema in VERSIONS
]
OF_THINGS = {"group": "example.org", "names": {"kind": "Thing"}, "versions": LISTED}
DEFINITION = yaml.safe_dump({"spec": OF_THINGS})
THING: dict[str, Any] = {
    "apiVersion": "example.org/v1",
    "kind": "Thing",
    "metadata": {"name": "thing", "labels": {"any": "label"}},
    "spec": {
        "size": 2, "interval": "1m30s", "colour": "red", "limit": "10%", "note": None,
        "labels": {"a": "b"}, "raw": {"any": {"thing": 1}}, "parts": [{"name": "first"}],
    },
}  # fmt: skip


def test_a_definition_is_fetched_and_a_resource_fits_it(server: FakeServer) -> None:
    server.get = (200, DEFINITION.encode())
    assert mistakes(fetch(f"{server.url}/thing.yaml"), THING) == []
    assert server.requests == [("/thing.yaml", b"")]


@cases(
    "path, value, says",
    ("spec.sise", 2, r"\$\.spec: .*'sise' was unexpected"),
    ("spec.parts.0.nam", "x", r"\$\.spec\.parts\[0\]: .*'nam' was unexpected"),
    ("spec.empty", {"field": 1}, r"\$\.spec\.empty: .*'field' was unexpected"),
    ("spec.labels.a", 1, r"\$\.spec\.labels\.a: 1 is not of type 'string'"),
    ("spec.size", "2", r"\$\.spec\.size: '2' is not of type 'integer'"),
    ("spec.size", 0, r"\$\.spec\.size: 0 is less than"),
    ("spec.size", None, r"\$\.spec\.size: None is not of type 'integer'"),
    ("spec.interval", "soon", r"\$\.spec\.interval: 'soon' does not match"),
    ("spec.colour", "green", r"\$\.spec\.colour: 'green' is not one of"),
    ("status", {}, r"\$: .*'status' was unexpected"),
    ("spec", {}, r"\$\.spec: 'size' is a required property"),
)
def test_what_a_definition_lacks_is_a_mistake(path: str, value: Any, says: str) -> None:
    document = copy.deepcopy(THING)
    place: Any = document
    *way, name = path.split(".")
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[name] = value
    (said,) = mistakes(DEFINITION, document)
    assert re.search(says, said)


@pytest.mark.parametrize("changed", [{"kind": "Other"}, {"apiVersion": "example.org/v1alpha1"}])
def test_a_definition_of_something_else_is_refused(changed: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"the definition is of example\.org/v1 Thing"):
        mistakes(DEFINITION, THING | changed)


def test_no_network_is_another_thing_than_a_wrong_address(server: FakeServer) -> None:
    server.get = (404, b"Not Found")
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        fetch(f"{server.url}/moved.yaml")
    with pytest.raises(UnreachableError, match=r"http://127\.0\.0\.1:1/"):
        fetch("http://127.0.0.1:1/thing.yaml")


@pytest.mark.slow
@pytest.mark.kubernetes
@pytest.mark.parametrize("kind", PUBLISHED)
def test_our_resources_are_what_the_published_definition_takes(kind: str) -> None:
    try:
        definition = fetch(PUBLISHED[kind])
    except UnreachableError as error:
        pytest.skip(f"no network: {error}")
    documents = [d for folder in FOLDERS for d in rendered(folder) if d["kind"] == kind]
    assert documents
    for document in documents:
        assert mistakes(definition, document) == []


@pytest.mark.kubernetes
def test_every_custom_resource_has_a_published_definition() -> None:
    """Kinds of Kubernetes' own have groups without a point, or of k8s.io."""
    documents = [document for folder in FOLDERS for document in rendered(folder)]
    groups = {d["kind"]: d["apiVersion"].partition("/")[0] for d in documents}
    kinds = {k for k, group in groups.items() if "." in group and not group.endswith("k8s.io")}
    assert kinds == PUBLISHED.keys()
