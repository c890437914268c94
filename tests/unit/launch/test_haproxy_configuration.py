"""What the command that Serve starts as HAProxy changes in Serve's configuration, and no more."""

import json
import re
import subprocess

import pytest

from app.errors import OverloadedError
from app.launch.haproxy import grpc_rules
from app.launch.haproxy.command import HaproxyCommand
from app.launch.haproxy.edits import (
    BEGIN_WITHIN_S,
    CLOSED,
    COPY_DEADLINE,
    ERROR_RESPONSES,
    FOREIGN_HEADERS,
    MOVED_TIMEOUT,
    OVERLONG,
    PROTOCOL_ERRORS,
    TEXT_HEADERS,
    UNWATCHED,
)
from tests.support.fake_haproxy import STARTED
from tests.support.haproxy_configs import CONFIG, PORTS, write_serves_config

NO_APPLICATION = """\
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path not found."
"""


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
    moved = [*MOVED_TIMEOUT, *PROTOCOL_ERRORS]
    rules += [rule.removeprefix("http-request ") for rule in moved]
    rules = [OVERLONG, *(f"http-request {rule}" for rule in rules)]
    rules += [UNWATCHED, CLOSED, "http-request wait-for-body time 10s at-least 15360 if METH_POST"]
    assert after[first : first + len(rules)] == [f"    {rule} # tandem" for rule in rules]
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
        f"bind unix@{command.parent}/local-grpc.sock mode 600 proto h2",
    ]
    assert after[first : first + len(of_grpc)] == [f"    {rule} # tandem" for rule in of_grpc]
    assert len(added) == len(rules) + 1 + 1 + len(ERROR_RESPONSES) + len(of_grpc)
    after = [line for line in after if line not in added]
    gone = " *(log 127|errorfile|option splice-)"
    before = [line for line in before if not re.match(gone, line)]
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
    *rules, wait = (line.strip().removesuffix(" # tandem") for line in lines[route - 13 : route])
    ours = "if { path_end /v1/classify /infer } is_http-tandem"
    assert wait == (
        "http-request wait-for-body time 10s at-least 15360 if METH_POST is_http-tandem"
    )
    assert config.read_text().count("wait-for-body") == 1  # nobody waits for what is refused
    assert rules[:2] == [
        f"http-request set-var(txn.gateways) nbsrv(http-tandem) {ours}",
        f"http-request set-var(txn.limit) int(7) {ours}",
    ]
    assert rules[3] == (
        f"http-request set-var(txn.full) bool(true) {ours} {{ nbsrv(http-tandem) gt 0 }} "
        "{ be_conn(http-tandem),div(txn.gateways),sub(txn.limit) ge 0 }"
    )
    of_infer, refusal = (rule for rule in rules if "status 429" in rule)
    assert of_infer.endswith("if { path_end /infer } is_http-tandem { var(txn.refused) -m bool }")
    (text,) = re.findall(r"lf-string '(.*)' if", of_infer)
    assert "%[var(txn.limit)] requests are under way" in json.loads(text)["error"]
    assert "return status 429 content-type application/json hdr retry-after 1" in refusal
    assert refusal.endswith(f"{ours} {{ var(txn.refused) -m bool }}")
    (text,) = re.findall(r"lf-string '(.*)' if", refusal)
    error = json.loads(text)["error"]
    assert error["code"] == OverloadedError.code
    assert "%[var(txn.limit)] requests are under way for each Gateway" in error["message"]
    assert config.read_text().count("status 429") == 2


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
    service = "inference.GRPCInferenceService"
    is_call = f"if {{ path /tandem.v1.Ensemble/Classify /{service}/ModelInfer }}"
    is_ours = f"if {{ path_beg /tandem.v1.Ensemble/ /{service}/ }}"
    for route, only in (
        ("use_backend grpc-tandem if is_grpc-tandem", " is_grpc-tandem"),
        ("default_backend grpc-tandem", ""),
    ):
        place = lines.index(route)
        *rules, wait, tell = lines[place - 13 : place]
        (refusal,) = (rule for rule in rules if " return " in rule)
        assert rules[0] == (
            f"http-request set-var(txn.gateways) nbsrv(grpc-tandem) {is_call}{only}"
        )
        assert refusal.startswith("http-request return status 200 hdr grpc-status 8 ")
        assert 'hdr grpc-message "%[var(txn.limit)] requests are under way for each' in refusal
        assert f"hdr error-code {OverloadedError.code} " in refusal
        assert refusal.endswith(f"{is_call}{only} {{ var(txn.refused) -m bool }}")
        assert wait == f"http-request wait-for-body time 10s at-least 15360 {is_ours}{only}"
        assert tell == f"{grpc_rules.TELL_PREFIX} {is_ours}{only}"
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
        "if { path_beg /tandem.v1.Ensemble/ /inference.GRPCInferenceService/ } # tandem",
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


@pytest.mark.parametrize("target", [None, "127.0.0.1:514", "/dev/log"])
def test_requests_are_logged_only_where_the_operator_says(tmp_path, monkeypatch, target):
    monkeypatch.delenv("RAY_SERVE_HAPROXY_LOG_TARGET", raising=False)
    if target is not None:
        monkeypatch.setenv("RAY_SERVE_HAPROXY_LOG_TARGET", target)
    command = HaproxyCommand(tmp_path / "haproxy", PORTS)
    command.write()
    config = write_serves_config(
        tmp_path / "haproxy.cfg", replicas={"http": 30000}, log_target=target or "127.0.0.1:514"
    )
    checked = subprocess.run([command.path, "-c", "-f", config], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    targets = re.findall(r"^ *log (.* local0 .*)$", config.read_text(), re.MULTILINE)
    assert targets == ([] if target is None else [f"{target} local0 info"])


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
    assert text.count("status 429") == 2 * (ports is not None and "http" in replicas)
