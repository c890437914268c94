"""Waiting for a deployed configuration, without a cluster: readiness, failures, the reason."""

import socketserver
import threading
from types import SimpleNamespace

import pytest
from ray import serve

from app.errors import ConfigError
from app.launch.deploy import ReportProgress, client_of, reason_in, wait_ready
from app.launch.ray_cluster import StopRequest
from tests.support.http_server import QuietRequest

OURS = ["tandem"]


def status(**states: str) -> SimpleNamespace:
    deployments = {name: SimpleNamespace(status=state) for name, state in states.items()}
    application = SimpleNamespace(status="DEPLOYING", deployments=deployments, message="")
    return SimpleNamespace(applications={"tandem": application})


def is_ready(url: str, report: ReportProgress, timeout_s: float = 10.0) -> bool:
    """Wait for the service at ``url``, which nobody asks to stop."""
    return wait_ready(client_of(url), StopRequest(), report, timeout_s, applications=OURS)


@pytest.fixture
def reported(monkeypatch) -> list[str]:
    monkeypatch.setattr(serve, "status", lambda: status(Gateway="HEALTHY", resnet50="UPDATING"))
    return []


def test_waiting_ends_when_the_service_is_ready(server, reported):
    assert is_ready(server.url, reported.append)
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

    assert is_ready(server.url, report, 30)
    assert len(server.requests) == 2


def test_a_proxy_of_the_user_is_not_asked_for_this_machine(server, reported, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert is_ready(server.url, reported.append, 0.5)


def test_waiting_ends_when_asked_to_stop(server, reported):
    stop = StopRequest()
    stop.set()
    assert not wait_ready(client_of(server.url), stop, reported.append, 10, applications=OURS)
    assert server.requests == []


def test_waiting_ends_with_the_message_of_a_deployment_that_failed(server, monkeypatch, reported):
    failed = status()
    failed.applications["tandem"].status = "DEPLOY_FAILED"
    failed.applications["tandem"].message = "sure.bin was altered"
    monkeypatch.setattr(serve, "status", lambda: failed)
    with pytest.raises(ConfigError, match=r"tandem could not be deployed: sure.bin was altered"):
        is_ready(server.url, reported.append)


def test_the_applications_of_others_may_fail(server, monkeypatch, reported):
    shared = status(Gateway="UPDATING")
    others = SimpleNamespace(status="DEPLOY_FAILED", deployments={}, message="boom")
    shared.applications = {"others": others, **shared.applications}
    monkeypatch.setattr(serve, "status", lambda: shared)
    assert is_ready(server.url, reported.append)
    assert reported == ["loading Gateway"]


def test_waiting_ends_after_its_time(reported):
    with pytest.raises(ConfigError, match="not ready after 0 s: loading resnet50"):
        is_ready("http://127.0.0.1:1", reported.append, 0)


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
