"""The variables that Ray reads, and its files that are read as text."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.calls import ray_compatibility
from app.environment import PROTECTING, node_environment, serve_environment
from app.errors import ConfigError
from app.launch import ray_sources
from app.launch.ray_sources import VARIABLES, check_protecting, haproxy_template
from tests.support.command_line import tandem

# The files in which Ray reads its environment; a binary contains the names that it reads.
OTHERS = ("_common/usage/usage_constants.py", "dashboard/modules/reporter/reporter_consts.py")
GCS = "core/src/ray/gcs/gcs_server"


def test_ray_reads_every_variable_that_is_set(tmp_path: Path) -> None:
    """It ignores unknown variables without a message."""
    of_node = {name for name in node_environment(tmp_path) if name.startswith("RAY_")}
    names = {*serve_environment(tmp_path, (1, 2)), *of_node}
    source = "".join(ray_sources._installed(file).read_text() for file in (*VARIABLES, *OTHERS))
    binary = ray_sources._installed(GCS).read_bytes()
    lost = {name for name in names if f'"{name}"' not in source}
    assert {name for name in lost if f"{name}\0".encode() not in binary} == set()


def test_variables_that_protect_nothing_are_not_looked_for() -> None:
    check_protecting(["RAY_X", "RAY_SERVE_HAPROXY_BIN", *PROTECTING])


@pytest.mark.parametrize("name", PROTECTING)
def test_a_variable_that_protects_is_demanded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    read = ray_sources._source
    renamed = lambda file: (read(file) or "").replace(name, "RAY_OTHER")  # noqa: E731
    monkeypatch.setattr(ray_sources, "_source", renamed)
    environment = serve_environment(tmp_path, (1, 2)) | dict.fromkeys(PROTECTING, "1")
    with pytest.raises(ConfigError, match=f"it does not read {name}; pip install"):
        check_protecting(environment)


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = SimpleNamespace(origin=str(tmp_path / "ray" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)


@pytest.mark.usefixtures("no_files")
def test_files_that_are_gone_are_as_variables_that_are_not_read() -> None:
    with pytest.raises(ConfigError, match=PROTECTING[0]):
        check_protecting(PROTECTING)
    check_protecting(["RAY_event_stats"])


def test_haproxys_template_that_is_gone_is_refused(request: pytest.FixtureRequest) -> None:
    assert "HAPROXY_CONFIG_TEMPLATE" in haproxy_template()
    request.getfixturevalue("no_files")
    with pytest.raises(ConfigError, match=r"no file serve/_private/haproxy_templates\.py"):
        haproxy_template()


def test_a_node_gets_no_environment_that_does_not_protect(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = ray_sources._source
    monkeypatch.setattr(
        ray_sources, "_source", lambda file: (read(file) or "").replace("MAXCONN", "MOST")
    )
    done = tandem("environment", "--folder", tmp_path / "new")
    assert "does not read RAY_SERVE_HAPROXY_MAXCONN" in str(done.exception)
    assert done.stdout == ""


def test_a_node_with_a_newer_ray_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_compatibility, "TESTED_RAY", ("2.1", "2.2"))
    done = tandem("environment", "--folder", tmp_path / "new")
    assert done.exit_code == 0
    assert "is newer than the versions that Tandem was tested with (2.1, 2.2)" in done.stderr
    assert "export RAY_SERVE_ENABLE_HA_PROXY=1" in done.stdout
