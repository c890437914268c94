"""The variables that Ray reads, and its files that are read as text."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.environment import PROTECTING, node_environment, serve_environment
from app.errors import ConfigError
from app.launch import ray_sources
from app.launch.ray_sources import check_variables, haproxy_template
from tests.support.command_line import tandem


def test_ray_reads_every_variable_that_is_set(tmp_path: Path) -> None:
    assert check_variables(serve_environment(tmp_path, (1, 2))) == []
    names = [name for name in node_environment(tmp_path) if name.startswith("RAY_")]
    assert check_variables(names) == []


def test_variables_that_ray_does_not_read_are_one_warning() -> None:
    (warning,) = check_variables(["RAY_X", "RAY_SERVE_HAPROXY_BIN", *PROTECTING])
    assert "does not read RAY_SERVE_HAPROXY_BIN, RAY_X. Left out: what they set" in warning


@pytest.mark.parametrize("name", PROTECTING)
def test_a_variable_that_protects_is_demanded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    read = ray_sources._source
    renamed = lambda file: (read(file) or "").replace(name, "RAY_OTHER")  # noqa: E731
    monkeypatch.setattr(ray_sources, "_source", renamed)
    environment = serve_environment(tmp_path, (1, 2)) | dict.fromkeys(PROTECTING, "1")
    with pytest.raises(ConfigError, match=f"it does not read {name}; pip install"):
        check_variables(environment)


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = SimpleNamespace(origin=str(tmp_path / "ray" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)


@pytest.mark.usefixtures("no_files")
def test_files_that_are_gone_are_as_variables_that_are_not_read() -> None:
    (warning,) = check_variables(["RAY_event_stats"])
    assert "does not read RAY_event_stats" in warning
    with pytest.raises(ConfigError, match=PROTECTING[0]):
        check_variables(PROTECTING)


def test_haproxys_template_that_is_gone_is_refused(request: pytest.FixtureRequest) -> None:
    assert "HAPROXY_CONFIG_TEMPLATE" in haproxy_template()
    request.getfixturevalue("no_files")
    with pytest.raises(ConfigError, match=r"no file serve/_private/haproxy_templates\.py"):
        haproxy_template()


def test_a_nodes_environment_names_what_is_not_read_and_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = ray_sources._source
    monkeypatch.setattr(
        ray_sources, "_source", lambda file: (read(file) or "").replace("NBTHREAD", "THREADS")
    )
    done = tandem("environment", "--folder", tmp_path / "new")
    assert done.exit_code == 0
    assert "RAY_SERVE_HAPROXY_NBTHREAD" in done.stderr
    assert "export RAY_SERVE_ENABLE_HA_PROXY=1" in done.stdout
