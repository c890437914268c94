"""Each rule on imports (pyproject.toml, [tool.importlinter]) is broken once, and found.

``make check`` says that the tree itself keeps them all.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("app", "models", "calibration", "client")
IF_TYPE_CHECKING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
# The contract's id, where a forbidden import is added, and what it imports.
BREAKS = [
    ("layers", "app/graph/members.py", "from app.serve import gateway"),
    ("layers", "app/queueing/scheduler.py", "from app.graph import members"),
    ("layers", "app/http/body.py", "from app.grpc import call"),
    ("layers", "app/telemetry/metrics.py", f"{IF_TYPE_CHECKING}    from app.http import errors"),
    ("calibration-layers", "calibration/sets/input.py", "from calibration.training import train"),
    ("models", "models/machine.py", "import ray"),
    ("models", "models/record.py", "from app import errors"),
    ("calibration", "calibration/statistics.py", "from app import settings"),
    ("calibration", "calibration/statistics.py", "from app import access"),
    ("calibration", "calibration/evaluation/live.py", "from app import settings"),
    ("calibration", "calibration/ladder/ladder.py", "from app.bench import load"),
    ("app", "app/bench/load.py", "from calibration.ladder import rungs"),
    ("app", "app/telemetry/export.py", "def late():\n    import torch"),
    ("pure", "app/queueing/scheduler.py", "import opentelemetry.trace"),
    ("calibration", "calibration/planning.py", "import fastapi"),
    ("pure", "app/serve/scaling.py", "import ray.serve"),
    ("pure", "app/answers.py", "import grpc"),
    ("pure", "app/access.py", "import ray"),
    ("pure", "app/oip/bodies.py", "import fastapi"),
    ("layers", "app/graph/request.py", "from app.oip import tensors"),
    ("client", "client/tandem_client/answers.py", "from models.errors import TandemError"),
    ("client", "client/tandem_client/images.py", "import cv2"),
    ("client-grpc", "client/tandem_client/client.py", "from tandem_client import tandem_pb2"),
    ("client-users", "app/bench/load.py", "import tandem_client"),
    ("client-users", "models/machine.py", "from tandem_client import images"),
]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    path = os.pathsep.join([str(folder), str(folder / "client")])
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def contracts():
    """The contracts by their ids."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return {each["id"]: each for each in config["tool"]["importlinter"]["contracts"]}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree's code."""
    folder = tmp_path_factory.mktemp("copy")
    for package in PACKAGES:
        only_code = shutil.ignore_patterns("*.bin", "*.xml", "__pycache__", "page")
        shutil.copytree(ROOT / package, folder / package, ignore=only_code)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.slow  # make check holds the rules; this breaks each
@pytest.mark.parametrize(("contract", "file", "lines"), BREAKS)
def test_a_broken_rule_and_the_import_that_breaks_it_are_named(copy, contract, file, lines):
    source = copy / file
    before = source.read_text("utf-8")
    source.write_text(f"{before}\n{lines}\n", "utf-8")
    try:
        done = lint(copy)
    finally:
        source.write_text(before, "utf-8")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contracts()[contract]['name']} BROKEN" in done.stdout
    module = file.removeprefix("client/").removesuffix(".py").replace("/", ".")
    assert f"{module} -> " in done.stdout


def test_every_rule_is_broken_once_and_the_tree_keeps_them_all(copy):
    assert {contract for contract, _, _ in BREAKS} == set(contracts())
    done = lint(copy)
    assert done.returncode == 0, done.stdout


def test_every_package_of_app_has_its_layer():
    """``exhaustive`` in the contract: a new package without a layer is an error."""
    layers = contracts()["layers"]
    assert layers["exhaustive"] is True
    named = {name.strip() for row in layers["layers"] for name in row.replace(":", "|").split("|")}
    modules = {p.stem for p in (ROOT / "app").glob("*.py")} - {"__init__"}
    assert named == modules | {p.parent.name for p in (ROOT / "app").glob("*/__init__.py")}
    assert len(modules) <= 9
