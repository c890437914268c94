"""Ray's private names, variables and files that ``tandem serve`` leans on."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.calls import ray_compatibility
from app.calls.ray_names import RayName
from app.environment import node_environment, serve_environment
from app.errors import ConfigError
from app.launch import ray_internals
from app.launch.ray_internals import (
    LAUNCH_NAMES,
    check_installed_ray,
    check_variables,
    haproxy_template,
    replaced,
)
from app.launch.serve import ServeOptions, run_service
from tests.support.command_line import tandem


def test_the_installed_ray_has_every_name() -> None:
    check_installed_ray()


@pytest.mark.parametrize("name", LAUNCH_NAMES, ids=lambda name: name.name)
def test_a_name_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch, name: RayName) -> None:
    owner_name, _, attribute = name.name.rpartition(".")
    owner = importlib.import_module(name.module)
    owner = getattr(owner, owner_name) if owner_name else owner
    monkeypatch.delattr(owner, attribute)
    with pytest.raises(ConfigError, match=rf"{name.module}\.{name.name} is not there;"):
        check_installed_ray()


def test_ray_reads_every_variable_that_is_set(tmp_path: Path) -> None:
    check_variables(serve_environment(tmp_path, (1, 2)))
    check_variables(node_environment(tmp_path))
    with pytest.raises(ConfigError, match="does not read RAY_SERVE_HAPROXY_BIN, RAY_X; pip"):
        check_variables({"RAY_X": "1", "RAY_SERVE_HAPROXY_BIN": "x"})


def test_a_file_of_rays_that_is_gone_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "HAPROXY_CONFIG_TEMPLATE" in haproxy_template()
    spec = SimpleNamespace(origin=str(tmp_path / "ray" / "__init__.py"))
    monkeypatch.setattr(ray_internals.importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(ConfigError, match=r"no file serve/_private/haproxy_templates\.py"):
        haproxy_template()


@pytest.mark.parametrize("address", [None, "auto"])
def test_serving_with_another_ray_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.setattr(ray_compatibility, "version", lambda _: "2.61.0")
    with pytest.raises(ConfigError, match=r"Ray 2\.61\.0 is installed.*==2\.60"):
        run_service(ServeOptions(address=address))


def test_a_nodes_environment_is_not_printed_for_another_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_compatibility, "version", lambda _: "2.61.0")
    done = tandem("environment", "--folder", tmp_path / "new")
    assert isinstance(done.exception, ConfigError)
    assert done.stdout == ""
    assert not (tmp_path / "new").exists()


def test_an_attribute_is_replaced_for_a_while() -> None:
    owner = SimpleNamespace(size=1)
    with replaced(owner, "size", 2):
        assert owner.size == 2
    assert owner.size == 1
    with pytest.raises(KeyError), replaced(owner, "size", 2):
        raise KeyError
    assert owner.size == 1
    with pytest.raises(AttributeError, match="weight"), replaced(owner, "weight", 2):
        pass
    assert not hasattr(owner, "weight")
