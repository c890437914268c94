"""The kustomizations of configs/kubernetes, rendered as whoever applies them has them."""

import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = Path(__file__).parents[2] / "configs" / "kubernetes"
KUSTOMIZE = shutil.which("kustomize")
KUBECTL = shutil.which("kubectl")  # has kustomize in it
FOLDERS = ("base", "kuberay", "rayjob", "kserve", "monitoring")


@cache
def rendered(folder: str) -> tuple[dict[str, Any], ...]:
    """Return the resources of a folder; AssertionError with what kustomize says."""
    command = [KUSTOMIZE, "build"] if KUSTOMIZE else [KUBECTL, "kustomize"]
    done = subprocess.run(
        [*map(str, command), str(KUBERNETES / folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(folder: str, kind: str) -> list[dict[str, Any]]:
    return [document for document in rendered(folder) if document["kind"] == kind]


def pods(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the pods that a resource makes: metadata and spec of each."""
    spec = document.get("spec", {})
    if document["kind"] in ("RayService", "RayJob"):
        cluster = spec.get("rayClusterConfig") or spec["rayClusterSpec"]
        groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        submitter = [spec["submitterPodTemplate"]] if document["kind"] == "RayJob" else []
        return submitter + [group["template"] for group in groups]
    if document["kind"] == "ServingRuntime":
        return [{"metadata": {"labels": spec["labels"]}, "spec": spec}]
    return [spec["template"]] if document["kind"] in ("Deployment", "StatefulSet") else []
