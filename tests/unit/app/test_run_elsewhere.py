"""README's "Run it elsewhere": six ways, and what their commands name is there."""

import re
from pathlib import Path

import pytest
import yaml

from tests.support.command_line import options_of

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text("utf-8")
SECTION = README.partition("## Run it elsewhere")[2].partition("\n## ")[0]
ROWS = [line for line in SECTION.splitlines() if line.startswith("| ")][2:]
COMMANDS = re.findall(r"`([^`]+)`", "\n".join(row.split("|")[2] for row in ROWS))


def test_six_ways_of_three_lines() -> None:
    ways = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row.split("|")[1]).strip() for row in ROWS]
    assert ways == ["a machine", "systemd", "a container", "Kubernetes", "Ray, KubeRay", "KServe"]
    assert [len(row.split("|")[2].split("<br>")) for row in ROWS] == [3] * len(ROWS)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("tandem ")])
def test_the_program_takes_it(command: str) -> None:
    name, *words = command.split()[1:]
    assert {word for word in words if word.startswith("--")} <= options_of(name)


@pytest.mark.parametrize("path", re.findall(r"(?<=[ (`])configs/[\w./-]+", SECTION))
def test_the_path_is_there(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("folder", re.findall(r"kubectl apply -k (\S+?)`", SECTION))
def test_kustomize_takes_the_folder(folder: str) -> None:
    assert (ROOT / folder / "kustomization.yaml").is_file()


def names_in(folder: str) -> set[str]:
    """Return the names of the folder's resources."""
    files = (ROOT / "configs" / "kubernetes" / folder).glob("*.yaml")
    documents = [d for file in files for d in yaml.safe_load_all(file.read_text("utf-8")) if d]
    return {d["metadata"]["name"] for d in documents if "metadata" in d}


def test_the_names_are_those_of_the_manifests() -> None:
    (secret,) = re.findall(r"kubectl create secret generic (\S+) --from-file=(\w+)", SECTION)
    deployment = (ROOT / "configs/kubernetes/base/deployment.yaml").read_text("utf-8")
    assert f"secretName: {secret[0]}" in deployment
    assert f"/{secret[1]}" in deployment
    (service,) = re.findall(r"kubectl get inferenceservice (\S+?)`", SECTION)
    assert service in names_in("kserve")
    (volume,) = re.findall(r"volume claim `(\w+)`", SECTION)
    inference = ROOT / "configs/kubernetes/kserve/inference-service.yaml"
    assert f"pvc://{volume}" in inference.read_text("utf-8")
    (unit,) = re.findall(r"systemctl enable --now (\S+?)`", SECTION)
    assert (ROOT / "configs" / "systemd" / f"{unit}.service").is_file()
