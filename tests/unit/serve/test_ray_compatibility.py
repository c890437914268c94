"""The installed Ray is looked at by itself: its version, and each name as it is used.

A Ray that lacks a private name serves without what leans on it, on each way in. With real services:
tests/e2e/test_renamed_ray.py.
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from app.errors import ConfigError
from app.launch.ray_features import LAUNCH_FEATURES
from app.main import build
from app.serve import ray_compatibility
from app.serve.ray_compatibility import (
    GRPC_OPTIONS,
    LOOPBACK,
    REFLECTION,
    REPLICA_FEATURES,
    STAGE_ROUTER,
    SURGE,
    TESTED_RAY,
    Feature,
    RayName,
    check_ray,
)
from app.settings import Settings
from tests.support.cases import cases
from tests.support.tiny_networks import write_tiny_set

ROOT = Path(__file__).parents[3]
PAIRS = [("limit", 1), ("depth", 2)]


class Thing:
    """What a private class of Ray's may look like."""

    def __init__(self, size: int) -> None:
        self._size = size

    def grow(self, by: int, *, at_once: bool) -> None:
        self._size += by * at_once


def feature(*names: RayName, is_required: bool = False) -> Feature:
    return Feature("the thing", "things stay as they are", names, is_required=is_required)


def test_the_installed_ray_has_every_name_of_the_replicas() -> None:
    warnings = check_ray()
    is_older = version("ray").startswith("2.59.")
    lacking = [feature for feature in (REFLECTION, SURGE) if is_older]
    assert len(warnings) == len(lacking)
    for warning, feature in zip(warnings, lacking, strict=True):
        assert f"Left out: {feature.name}" in warning


def test_the_versions_are_what_the_project_pins() -> None:
    """It allows one minor version more, which is warned of."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (pinned,) = [one for one in project["dependencies"] if one.startswith("ray[")]
    major, minor = TESTED_RAY[-1].split(".")
    assert pinned == f"ray[serve]>={TESTED_RAY[0]},<{major}.{int(minor) + 2}"


PROBLEMS = [
    (RayName("ray.serve._private.nowhere", "x"), "nowhere.x is not there"),
    (RayName("ray.serve", "nothing"), "ray.serve.nothing is not there"),
    (RayName(__name__, "Thing.shrink"), "Thing.shrink is not there"),
    (RayName(__name__, "Thing.grow", ("by", "fast", "soon")), "Thing.grow takes no fast, soon"),
    (RayName(__name__, "Thing", attributes=("_size", "_age")), "Thing has no _age"),
    (RayName(__name__, "PAIRS", entries=("limit", "width")), "PAIRS lists no width"),
    (RayName(__name__, "ROOT", entries=("limit",)), "ROOT lists no limit"),
]


@pytest.mark.parametrize(("name", "problem"), PROBLEMS)
def test_a_feature_that_does_not_fit_is_left_out_with_one_warning_or_refused(name, problem):
    (warning,) = [w for w in check_ray([*REPLICA_FEATURES, feature(name)]) if "the thing" in w]
    assert problem in warning
    assert warning.endswith("Left out: the thing: things stay as they are")
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        check_ray([*REPLICA_FEATURES, feature(name, is_required=True)])
    said = caught.value.message
    assert re.match(r"Ray 2\.\d+\.\S+ is installed, and Tandem needs 2\.59 or later:", said)
    assert said.endswith("pip install 'ray[serve]==2.60.*'")


def test_what_is_there_is_no_problem() -> None:
    fitting = feature(
        RayName(__name__, "Thing", ("size",), ("_size",)),
        RayName(__name__, "Thing.grow", ("by", "at_once")),
        RayName(__name__, "PAIRS", entries=("limit", "depth")),
    )
    assert fitting.fits()


@pytest.mark.parametrize("version", ["2.58.9", "2.6.0", "1.60.0"])
def test_an_older_version_is_refused_before_its_names_are_looked_up(monkeypatch, version):
    monkeypatch.setattr(ray_compatibility, "version", lambda _: version)
    said = f"Ray {version} is installed, and Tandem needs 2.59"
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_ray([feature(RayName("ray.serve", "nothing"), is_required=True)])


@cases(
    "version, is_newer",
    *((version, True) for version in ("2.61.0", "2.100.0rc1", "3.0.0")),
    *((version, False) for version in ("2.59.1", "2.60.0", "2.60.7")),
)
def test_a_newer_version_is_served_with_and_warned_of(monkeypatch, version, is_newer):
    monkeypatch.setattr(ray_compatibility, "version", lambda _: version)
    says = f"Ray {version} is newer than the versions that Tandem was tested with"
    warnings = check_ray([feature(RayName(__name__, "Thing"))])
    assert [says in warning for warning in warnings] == [True] * is_newer


def test_serve_run_and_serve_deploy_ask_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_compatibility, "version", lambda _: "2.58.0")
    with pytest.raises(ConfigError, match=r"pip install 'ray\[serve\]==2\.60\.\*'"):
        build(Settings())


# A name is taken away before anything of ``app`` is imported, and a picture is classified.


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
