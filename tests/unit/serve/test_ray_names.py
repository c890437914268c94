"""A Ray that lacks a private name serves without what leans on it, on each way in.

A name is taken away before anything of ``app`` is imported, and a picture is classified. With real
services: tests/e2e/test_renamed_ray.py.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.launch.ray_features import LAUNCH_FEATURES
from app.serve.ray_compatibility import (
    GRPC_OPTIONS,
    LOOPBACK,
    REFLECTION,
    REPLICA_FEATURES,
    STAGE_ROUTER,
    SURGE,
    RayName,
)
from tests.support.tiny_networks import write_tiny_set

ROOT = Path(__file__).parents[3]
OF_NEWER_RAY = (SURGE, REFLECTION)  # Ray 2.59 has neither
PRIVATE = ("ray._private", "ray.serve._private", "ray.serve.context", "grpc.aio._server")
OPTIONAL = [
    pytest.param(feature, name, id=f"{name.module}.{name.name}")
    for feature in REPLICA_FEATURES
    for name in feature.names
    if not feature.is_required
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The answers of all processes, by the name that each lacks."""
    folder = tmp_path_factory.mktemp("set") / "tiny"
    write_tiny_set(folder, gains={"only": 4.0})
    names = [name for feature in REPLICA_FEATURES for name in feature.names]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.names_taken_away", str(folder)],
        input="\n".join(f"{name.module} {name.name}" for name in names),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(names), done.stderr
    return {row["name"]: row for row in rows}


def dotted(name: RayName) -> str:
    return f"{name.module}.{name.name}"


@pytest.mark.slow  # make test looks each name up, in tests/unit/launch and serve
@pytest.mark.parametrize(("feature", "name"), OPTIONAL)
def test_without_an_optional_name_a_picture_is_classified(answers, feature, name):
    answer = answers[dotted(name)]
    assert "error" not in answer, answer["error"]
    assert (answer["status"], answer["label"]) == (200, "mostly red")
    left_out = [line for line in answer["log"].splitlines() if "Left out" in line]
    others = [other.name for other in OF_NEWER_RAY if other is not feature]
    (warning,) = [line for line in left_out if not any(other in line for other in others)]
    assert f"{dotted(name)} is not there" in warning
    assert f"Left out: {feature.name}: {feature.without}" in warning
    ours = "app.serve.locality_router:LocalityRouter"
    has_router = {router == ours for router in answer["routers"].values()}
    assert has_router == {feature is not STAGE_ROUTER}


@pytest.mark.slow  # as above
@pytest.mark.parametrize("name", LOOPBACK.names, ids=dotted)
def test_without_what_protects_the_service_is_refused_in_a_line(answers, name):
    error = answers[dotted(name)]["error"]
    assert error.startswith("ConfigError: Ray ")
    assert f"{dotted(name)} is not there (gRPC servers on loopback" in error
    assert "; pip install 'ray[serve]==" in error
    assert "\n" not in error


def test_the_features_are_those_that_something_leans_on() -> None:
    optional = {GRPC_OPTIONS, STAGE_ROUTER}
    assert optional < {feature for feature in REPLICA_FEATURES if not feature.is_required}
    features = (*REPLICA_FEATURES, *LAUNCH_FEATURES)
    assert sum(len(feature.names) for feature in features if feature.is_required) <= 12
    assert sum(len(feature.names) for feature in features) <= 40


def imports_at_the_top(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    modules: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def test_no_module_imports_a_private_name_before_it_was_looked_up() -> None:
    importing = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "app").rglob("*.py")
        if any(
            f"{module}.".startswith(f"{p}.") for p in PRIVATE for module in imports_at_the_top(path)
        )
    }
    assert not importing
