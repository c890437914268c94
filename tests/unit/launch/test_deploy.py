"""Ports, signals and waiting, without a cluster."""

import os
import signal
import socket
import socketserver
import threading
from types import SimpleNamespace

import psutil
import pytest
from ray import serve

from app.errors import ConfigError
from app.launch import checks
from app.launch.checks import OF_REPLICAS, check_port, free_port
from app.launch.deploy import client_of, reason_in, wait_ready
from app.launch.ray_cluster import SIGNALS, StopRequest, stop_signals
from tests.support.http_server import QuietRequest


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_taken_port_names_port_process_and_remedy(listener):
    port = listener.getsockname()[1]
    with pytest.raises(ConfigError) as caught:
        check_port("127.0.0.1", port)
    message = caught.value.message
    assert f"127.0.0.1:{port}" in message
    assert f"process {os.getpid()}, {psutil.Process().name()}" in message
    assert "--port" in message


def test_a_port_taken_on_one_address_is_taken_on_all(listener):
    with pytest.raises(ConfigError, match="in use"):
        check_port("0.0.0.0", listener.getsockname()[1])


def test_free_ports_pass():
    port = free_port()
    check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)  # the check itself leaves nothing behind
    check_port("localhost", port)


def test_free_ports_are_not_the_kernels_to_hand_out(tmp_path, monkeypatch):
    given = tmp_path / "range"
    given.write_text("32768\t60999\n")
    monkeypatch.setattr(checks, "LOCAL_PORT_RANGE", given)
    found = {free_port() for _ in range(500)}
    assert len(found) == 500  # two of one process never get the same
    assert all(20_000 <= port < 32_768 or port > 60_999 for port in found)
    assert not found & set(OF_REPLICAS)
    given.write_text("1024 65535")
    assert 1024 <= free_port() <= 65_535
    given.unlink()
    assert free_port() >= 20_000


@pytest.mark.parametrize("port", [70_000, -1])
def test_a_port_that_cannot_exist(port):
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        check_port("127.0.0.1", port)


def test_an_address_that_is_not_this_machines():
    with pytest.raises(ConfigError, match=r"cannot listen on 192.0.2.1:8000"):
        check_port("192.0.2.1", 8000)


def arrive(number: signal.Signals) -> None:
    """Do what Python does when the signal comes; e2e sends real ones."""
    handler = signal.getsignal(number)
    assert callable(handler)
    handler(number, None)


def test_the_first_signal_asks_and_later_ones_change_nothing():
    before = [signal.getsignal(number) for number in SIGNALS]
    with stop_signals() as stop:
        assert not stop.is_set()
        assert not stop.wait(0)
        for number in (*SIGNALS, signal.SIGINT):
            arrive(number)
        assert stop.wait(0)
        assert stop.is_set()
    assert [signal.getsignal(number) for number in SIGNALS] == before


OURS = ["tandem"]


def status(**states: str) -> SimpleNamespace:
    deployments = {name: SimpleNamespace(status=state) for name, state in states.items()}
    application = SimpleNamespace(status="DEPLOYING", deployments=deployments, message="")
    return SimpleNamespace(applications={"tandem": application})


@pytest.fixture
def reported(monkeypatch) -> list[str]:
    monkeypatch.setattr(serve, "status", lambda: status(Gateway="HEALTHY", resnet50="UPDATING"))
    return []


def test_waiting_ends_when_the_service_is_ready(server, reported):
    assert wait_ready(client_of(server.url), StopRequest(), reported.append, 10, applications=OURS)
    assert server.requests == [("/readyz", b"")]
    assert reported == ["loading resnet50"]


def test_with_a_socket_nothing_is_asked_of_the_port(reported, tmp_path):
    """The port may ask for a certificate; HAProxy's socket in the run's folder does not."""
    asked = []

    class Ready(QuietRequest):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send(200, b"{}")

        def address_string(self) -> str:
            return "a socket"

    path = tmp_path / "local.sock"
    with socketserver.UnixStreamServer(str(path), Ready) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            client = client_of("https://127.0.0.1:1", path)
            assert wait_ready(client, StopRequest(), reported.append, 10, applications=OURS)
        finally:
            server.shutdown()
            thread.join()
    assert asked == ["/readyz"]


def test_waiting_goes_on_while_the_service_is_not_ready(server, reported):
    server.get = (503, b"{}")

    def report(text: str) -> None:
        reported.append(text)
        if len(reported) == 2:
            server.get = (200, b"{}")

    assert wait_ready(client_of(server.url), StopRequest(), report, 30, applications=OURS)
    assert len(server.requests) == 2


def test_a_proxy_of_the_user_is_not_asked_for_this_machine(server, reported, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert wait_ready(client_of(server.url), StopRequest(), reported.append, 0.5, applications=OURS)


def test_waiting_ends_when_asked_to_stop(server, reported):
    with stop_signals() as stop:
        arrive(signal.SIGTERM)
        assert not wait_ready(client_of(server.url), stop, reported.append, 10, applications=OURS)
    assert server.requests == []


def test_waiting_ends_with_the_message_of_a_deployment_that_failed(server, monkeypatch, reported):
    failed = status()
    failed.applications["tandem"].status = "DEPLOY_FAILED"
    failed.applications["tandem"].message = "sure.bin was altered"
    monkeypatch.setattr(serve, "status", lambda: failed)
    with pytest.raises(ConfigError, match=r"tandem could not be deployed: sure.bin was altered"):
        wait_ready(client_of(server.url), StopRequest(), reported.append, 10, applications=OURS)


def test_the_applications_of_others_may_fail(server, monkeypatch, reported):
    shared = status(Gateway="UPDATING")
    others = SimpleNamespace(status="DEPLOY_FAILED", deployments={}, message="boom")
    shared.applications = {"others": others, **shared.applications}
    monkeypatch.setattr(serve, "status", lambda: shared)
    assert wait_ready(client_of(server.url), StopRequest(), reported.append, 10, applications=OURS)
    assert reported == ["loading Gateway"]


def test_waiting_ends_after_its_time(reported):
    with pytest.raises(ConfigError, match="not ready after 0 s: loading resnet50"):
        wait_ready(
            client_of("http://127.0.0.1:1"),
            StopRequest(),
            reported.append,
            0,
            applications=OURS,
        )


SERVES_MESSAGE = """The deployment failed to start 3 times in a row. Error:
\x1b[36mray::ServeReplica:x:A.initialize_and_get_metadata()\x1b[39m (pid=1)
  File "replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "classifier.py", line 9, in __init__
    raise ModelSetError(...)
"""


@pytest.mark.parametrize(
    ("last_lines", "reason"),
    [
        (
            "models.errors.ModelSetError: a.xml was altered: restore it",
            "a.xml was altered: restore it",
        ),
        ("models.golden.GoldenMismatchError: sure: x\nmore", "sure: x"),
        ("ValueError: out of range", "ValueError: out of range"),
        ("torch.cuda.OutOfMemoryError: none", "torch.cuda.OutOfMemoryError: none"),
    ],
)
def test_the_reason_of_a_failed_replica_is_told_without_its_traceback(last_lines, reason):
    assert reason_in(SERVES_MESSAGE + last_lines) == reason


def test_a_message_without_an_error_has_no_reason():
    assert reason_in("Waiting for a node with 1 CPU") is None
