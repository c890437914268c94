"""The installed Ray is looked at by itself: its version, and each name as it is used."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from app.errors import ConfigError
from app.main import build
from app.serve import ray_compatibility
from app.serve.ray_compatibility import (
    REFLECTION,
    REPLICA_FEATURES,
    SURGE,
    TESTED_RAY,
    Feature,
    RayName,
    check_ray,
)
from app.settings import Settings

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


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [
        *((version, True) for version in ("2.61.0", "2.100.0rc1", "3.0.0")),
        *((version, False) for version in ("2.59.1", "2.60.0", "2.60.7")),
    ],
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
