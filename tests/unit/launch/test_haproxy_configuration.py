"""What the command that Serve starts as HAProxy changes in Serve's configuration, and no more."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from app.launch.haproxy.answers import WITHOUT_PATH, answers
from app.launch.haproxy.command import HaproxyCommand
from app.launch.haproxy.edits import BEGIN, OVERLONG, PATIENT, UNWATCHED, WHOLE, backend_of
from app.launch.haproxy.grpc_rules import COPY_DEADLINE
from app.launch.haproxy.refusals import IS_CLASSIFY
from ray.serve._private.haproxy import HAProxyManager

from app.environment import GATEWAY_TIMEOUT, node_environment
from app.errors import OverloadedError
from app.launch.haproxy import grpc_rules
from app.queueing.haproxy_headers import INTERNAL_HEADERS
from tests.support.fake_haproxy import STARTED
from tests.support.haproxy_configs import CONFIG, PORTS, write_serves_config

NO_APPLICATION = """\
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path not found."
"""
SECTION = re.compile(r"^(global|defaults|frontend|backend|listen)\b.*", re.MULTILINE)


def sections(text: str) -> dict[str, list[str]]:
    """Return the lines of each section by its name, without our marks."""
    parts = SECTION.split(text)
    names = [found[0] for found in SECTION.finditer(text)]
    bodies = parts[2::2]
    return {
        name: [re.sub(r" # tandem \S+$", "", line).strip() for line in body.splitlines() if line]
        for name, body in zip(names, bodies, strict=True)
    }


def edited(command: Path, config: Path) -> dict[str, list[str]]:
    """Let the command edit a file twice, as Serve's reloads do; return its sections."""
    for _ in range(2):
        ran = subprocess.run([command, "-W", "-f", config, "-x", "two words"], check=False)
        assert ran.returncode == STARTED  # exec: the binary's own exit code, and its process
    return sections(config.read_text())


def test_only_our_application_has_our_rules(command: Path, tmp_path: Path) -> None:
    HaproxyCommand(command, PORTS).write(max_requests=7)
    config = tmp_path / "a folder" / "haproxy.cfg"
    config.parent.mkdir()
    config.write_text(CONFIG)
    before, after = sections(CONFIG), edited(command, config)
    called = (tmp_path / "called").read_text().splitlines()
    assert called == ["-W", "-f", str(config), "-x", "two words"]
    assert after.keys() == before.keys()
    gone = re.compile("log 127|option splice-")
    kept = {name: [line for line in before[name] if not gone.match(line)] for name in before}
    added = {name: [line for line in after[name] if line not in kept[name]] for name in after}
    assert not added["backend http-other"] + added["backend grpc-other"] + added["global"]
    folder = command.parent
    expected = {
        "defaults": ["timeout http-request 10s", *answers(WITHOUT_PATH)],
        "frontend prometheus": ["bind 127.0.0.1:9101"],
        "frontend http_frontend": [
            "option disable-h2-upgrade",
            f"bind unix@{folder}/local.sock mode 600",
        ],
        "listen stats": ["bind 127.0.0.1:8404"],
    }
    assert {name: added[name] for name in expected} == expected
    of_grpc = added["frontend grpc_frontend"]
    assert of_grpc[-1] == f"bind unix@{folder}/local-grpc.sock mode 600 proto h2"
    assert all("ray.serve" in line for line in of_grpc if line.startswith("http-request "))
    ours = added["backend http-tandem"]
    assert ours.index(OVERLONG) < ours.index(UNWATCHED) < ours.index(BEGIN)
    assert [line for line in ours if line.startswith(("retry-on", "http-reuse"))] == [
        "retry-on conn-failure empty-response",
        "http-reuse safe",
    ]
    for name in kept:
        left = [line for line in after[name] if line not in added[name]]
        moved = ("bind :9101", "bind *:8404", "http-reuse always")
        assert left == [line for line in kept[name] if line in left or line not in moved]


def test_headers_of_ours_are_taken_away_before_one_is_set(command: Path, tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    found = edited(command, config)
    for section in ("backend http-tandem", "backend grpc-tandem"):
        lines = found[section]
        (removal,) = (n for n, line in enumerate(lines) if "del-header ^(" in line)
        assert all(name in lines[removal] for name in INTERNAL_HEADERS)
        set_at = [n for n, line in enumerate(lines) if "http-request set-header x-" in line]
        assert set_at
        assert min(set_at) > removal


def test_what_is_too_much_is_refused_by_haproxy(command, tmp_path):
    HaproxyCommand(command, PORTS).write(max_requests=7)
    config = write_serves_config(tmp_path / "haproxy.cfg", ports=PORTS, replicas={"http": 30000})
    found = edited(command, config)
    lines = found["backend http-tandem"]
    ours = f"if {IS_CLASSIFY}"
    first = lines.index(f"http-request set-var(txn.gateways) nbsrv(http-tandem) {ours}")
    *rules, wait, count, track, answered = lines[first:][:17]
    assert wait == BEGIN
    assert count == f"http-request set-var(txn.counted) bool(true) {ours}"
    counted = "table http-tandem if { var(txn.counted) -m bool }"
    assert track == f"http-request track-sc1 int(0) {counted}"
    assert answered == f"http-response track-sc2 int(1) {counted}"
    assert config.read_text().count("wait-for-body") == 1  # nobody waits for what is refused
    assert rules[2] == f"http-request set-var(txn.limit) int(7) {ours}"
    assert rules[4] == (
        f"http-request set-var(txn.full) bool(true) {ours} {{ nbsrv(http-tandem) gt 0 }} "
        "{ int(0),table_conn_cur(http-tandem),sub(txn.answered),div(txn.gateways),"
        "sub(txn.limit) ge 0 }"
    )
    of_infer, refusal = (rule for rule in rules if "status 429" in rule)
    assert of_infer.endswith("if { path_end /infer :predict } { var(txn.refused) -m bool }")
    (text,) = re.findall(r"lf-string '(.*)' if", of_infer)
    assert "%[var(txn.limit)] requests are under way" in json.loads(text)["error"]
    assert "return status 429 content-type application/json hdr retry-after 1" in refusal
    assert refusal.endswith(f"{ours} {{ var(txn.refused) -m bool }}")
    (text,) = re.findall(r"lf-string '(.*)' if", refusal)
    error = json.loads(text)["error"]
    assert error["code"] == OverloadedError.code
    assert "%[var(txn.limit)] requests are under way for each Gateway" in error["message"]
    assert config.read_text().count("status 429") == 2


def test_calls_that_are_too_much_are_refused_by_haproxy(command, tmp_path):
    HaproxyCommand(command, PORTS).write(max_requests=7)
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    lines = edited(command, config)["backend grpc-tandem"]
    service = "inference.GRPCInferenceService"
    is_call = f"if {{ path /tandem.v1.Ensemble/Classify /{service}/ModelInfer }}"
    is_ours = f"if {{ path_beg /tandem.v1.Ensemble/ /{service}/ /grpc.health.v1.Health/ }}"
    first = lines.index(f"http-request set-var(txn.gateways) nbsrv(grpc-tandem) {is_call}")
    *rules, wait, tell, _, track, answered = lines[first:][:17]
    (refusal,) = (rule for rule in rules if " return " in rule)
    assert refusal.startswith("http-request return status 200 hdr grpc-status 8 ")
    assert 'hdr grpc-message "%[var(txn.limit)] requests are under way for each' in refusal
    assert f"hdr error-code {OverloadedError.code} " in refusal
    assert refusal.endswith(f"{is_call} {{ var(txn.refused) -m bool }}")
    assert wait == f"http-request wait-for-body time 10s at-least 15360 {is_ours}"
    assert tell == grpc_rules.TELL_PREFIX
    assert "track-sc1 int(0) table grpc-tandem" in track
    assert "track-sc2 int(1) table grpc-tandem" in answered


def test_on_a_cluster_requests_are_held_whole_and_prometheus_reaches_the_metrics(command, tmp_path):
    HaproxyCommand(command, ports=None).write()
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG + NO_APPLICATION)
    found = edited(command, config)
    assert found["global"][0] == "tune.memory.hot-size 16777216"
    ours, others = found["backend http-tandem"], found["backend http-other"]
    assert [line for line in ours if "wait-for-body" in line] == [BEGIN, WHOLE]
    for section in ("backend http-tandem", "backend grpc-tandem"):
        assert "retry-on conn-failure empty-response response-timeout" in found[section]
        assert "timeout server 5000ms" in found[section]
        assert not set(PATIENT) - set(found[section])
    assert others == ["http-reuse always", "http-request del-header x-other"]
    assert "bind :9101" in found["frontend prometheus"]
    assert "bind *:8404" in found["listen stats"]


def test_on_a_cluster_how_long_a_gateway_is_waited_for_is_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GATEWAY_TIMEOUT, "7.5")
    assert node_environment(tmp_path)[GATEWAY_TIMEOUT] == "7.5"
    HaproxyCommand(tmp_path / "haproxy", ports=None).write()
    assert "timeout server 7500ms" in (tmp_path / "edits.sed").read_text()


@pytest.mark.parametrize("name", ["tandem", "My_app#2/x y"])
def test_an_application_is_found_by_the_name_that_serve_makes_of_it(name: str) -> None:
    assert backend_of("http", name) == f"backend {HAProxyManager.get_safe_name(f'http-{name}')}"


def test_on_a_cluster_a_new_haproxy_is_not_ready_rather_than_ignorant(command, tmp_path):
    """Serve's answer where no application is known yet is 404, which no client tries again."""
    HaproxyCommand(command, ports=None).write()
    config = write_serves_config(tmp_path / "haproxy.cfg")
    line = edited(command, config)["backend default_backend"][0]
    assert line.startswith("http-request return status 503 content-type application/json hdr")
    (text,) = re.findall(r"string '(.*)'", line)
    assert json.loads(text)["error"]["code"] == "not_ready"


def test_on_a_cluster_a_path_of_no_application_stays_unknown(command, tmp_path):
    HaproxyCommand(command, ports=None).write()
    config = write_serves_config(tmp_path / "haproxy.cfg", others={"http": 30000})
    line = edited(command, config)["backend default_backend"][0]
    assert line.startswith("http-request return status 404 content-type text/plain")


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
    has_http, has_grpc = "http" in replicas, grpc_port is not None and "grpc" in replicas
    assert text.count("wait-for-body") == has_grpc + has_http * (1 if ports else 2)
    assert text.count("timeout http-request") == 1
    assert text.count(COPY_DEADLINE) == has_grpc
    assert text.count("status 429") == 2 * (ports is not None and has_http)
