"""The installed Ray is the one that the application was written for, or it is told what to do."""

import re
import tomllib
from pathlib import Path

import pytest

from app.calls import ray_compatibility
from app.calls.ray_compatibility import SUPPORTED_RAY, check_ray
from app.calls.ray_names import REPLICA_NAMES, RayName
from app.errors import ConfigError
from app.main import build
from app.settings import Settings

ROOT = Path(__file__).parents[3]


class Thing:
    """What a private class of Ray's may look like."""

    def __init__(self, size: int) -> None:
        self._size = size

    def grow(self, by: int, *, at_once: bool) -> None:
        self._size += by * at_once


def test_the_installed_ray_has_every_name() -> None:
    check_ray()


def test_the_constant_is_what_the_project_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (pinned,) = [one for one in project["dependencies"] if one.startswith("ray[")]
    major, minor = SUPPORTED_RAY.split(".")
    assert pinned == f"ray[serve]>={SUPPORTED_RAY},<{major}.{int(minor) + 1}"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (RayName("ray.serve._private.nowhere", "x"), "nowhere.x is not there"),
        (RayName("ray.serve", "nothing"), "ray.serve.nothing is not there"),
        (RayName(__name__, "Thing.shrink"), "Thing.shrink is not there"),
        (RayName(__name__, "Thing.grow", ("by", "fast", "soon")), "Thing.grow takes no fast, soon"),
        (RayName(__name__, "Thing", attributes=("_size", "_age")), "Thing has no _age"),
    ],
)
def test_what_is_gone_or_has_another_shape_is_named(name: RayName, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        check_ray([*REPLICA_NAMES, name])
    assert re.match(r"Ray 2\.60\.\S+ is installed, and Tandem needs 2\.60:", caught.value.message)
    assert caught.value.message.endswith("pip install 'ray[serve]==2.60.*'")


def test_what_is_there_is_no_problem() -> None:
    for name in (
        RayName(__name__, "Thing", ("size",), ("_size",)),
        RayName(__name__, "Thing.grow", ("by", "at_once")),
    ):
        assert name.problem() is None


@pytest.mark.parametrize("found", ["2.59.1", "2.6.0", "2.61.0", "3.60.0"])
def test_another_version_is_refused_before_its_names_are_looked_up(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(ray_compatibility, "version", lambda _: found)
    said = f"Ray {found} is installed, and Tandem needs 2.60"
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_ray([RayName("ray.serve", "nothing")])


def test_serve_run_and_serve_deploy_ask_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_compatibility, "version", lambda _: "2.61.0")
    with pytest.raises(ConfigError, match=r"pip install 'ray\[serve\]==2\.60\.\*'"):
        build(Settings())
