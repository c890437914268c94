"""Waiting for a deployed configuration, without a cluster: readiness, failures, the reason."""

import socketserver
import threading
from types import SimpleNamespace

import pytest
from ray import serve
from ray.exceptions import RayActorError

from app.errors import ConfigError, NotReadyError
from app.launch import deploy
from app.launch.config import ServeConfig, default_config
from app.launch.deploy import as_served, client_of, reason_in, start_serve, wait_ready
from app.launch.ray_cluster import StopRequest
from tests.support.cases import cases
from tests.support.http_server import QuietRequest


def status(**states: str) -> SimpleNamespace:
    deployments = {name: SimpleNamespace(status=state) for name, state in states.items()}
    application = SimpleNamespace(status="DEPLOYING", deployments=deployments, message="")
    return SimpleNamespace(applications={"tandem": application})


def is_ready(url, report, timeout_s=10.0, *, stop=None, socket=None) -> bool:
    client = client_of(url, socket)
    return wait_ready(client, stop or StopRequest(), report, timeout_s, applications=["tandem"])


@pytest.fixture
def reported(monkeypatch) -> list[str]:
    monkeypatch.setattr(serve, "status", lambda: status(Gateway="HEALTHY", resnet50="UPDATING"))
    return []


def test_waiting_ends_when_the_service_is_ready(server, reported, monkeypatch):
    """A proxy of the user is not asked for this machine."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
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
            assert is_ready("https://127.0.0.1:1", reported.append, socket=path)
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


def test_waiting_ends_when_asked_to_stop(server, reported):
    stop = StopRequest()
    stop.set()
    assert not is_ready(server.url, reported.append, stop=stop)
    assert server.requests == []


def test_waiting_ends_with_the_message_of_a_deployment_that_failed(server, monkeypatch, reported):
    """The applications of others may fail."""
    shared = status(Gateway="UPDATING")
    others = SimpleNamespace(status="DEPLOY_FAILED", deployments={}, message="sure.bin was altered")
    shared.applications = {"others": others, **shared.applications}
    monkeypatch.setattr(serve, "status", lambda: shared)
    assert is_ready(server.url, reported.append)
    assert reported == ["loading Gateway"]
    shared.applications["tandem"] = others
    with pytest.raises(ConfigError, match=r"tandem could not be deployed: sure.bin was altered"):
        is_ready(server.url, reported.append)


def test_waiting_ends_after_its_time(reported):
    with pytest.raises(ConfigError, match="not ready after 0 s: loading resnet50"):
        is_ready("http://127.0.0.1:1", reported.append, 0)


TRACE = """The deployment failed to start 3 times in a row. Error:
\x1b[36mray::ServeReplica:x:A.initialize_and_get_metadata()\x1b[39m (pid=1)
  File "replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "classifier.py", line 9, in __init__
    raise ModelSetError(...)
"""


@cases(
    "message, reason",
    (
        f"{TRACE}models.errors.ModelSetError: a.xml was altered: fetch it",
        "a.xml was altered: fetch it",
    ),
    (f"{TRACE}models.golden.GoldenMismatchError: sure: x\nmore", "sure: x"),
    (f"{TRACE}ValueError: out of range", "ValueError: out of range"),
    (f"{TRACE}torch.cuda.OutOfMemoryError: none", "torch.cuda.OutOfMemoryError: none"),
    ("Waiting for a node with 1 CPU", None),
)
def test_the_reason_of_a_failed_replica_is_told_without_its_traceback(message, reason):
    assert reason_in(message) == reason


@cases(
    "options, node, answers",
    ({"host": "0.0.0.0", "port": 8123}, "mine", "http://127.0.0.1:8123"),
    ({"host": "0.0.0.0", "port": 8123}, "other", "http://10.0.0.7:8123"),  # without a proxy
    ({"host": "10.0.0.9", "port": 8123}, "other", "http://10.0.0.9:8123"),  # a balancer's
    ({}, "other", "http://127.0.0.1:8000"),  # Serve's own defaults
    ({"ssl_certfile": "c", "ssl_keyfile": "k"}, "mine", "https://127.0.0.1:8000"),
)
def test_on_a_cluster_the_address_is_that_of_the_serve_that_runs(options, node, answers):
    asked = ServeConfig.read(default_config()).changed(http={"port": 9999}, grpc_port=9998)
    details = {"http_options": options, "grpc_options": {"port": 9100}}
    proxies = {"mine": {"node_ip": "10.0.0.7"}}
    served = as_served(asked, details | {"proxies": proxies}, node)
    assert (served.url, served.grpc_port) == (answers, 9100)
    assert served.settings == asked.settings


def test_a_proxy_that_dies_while_serve_starts_does_not_end_the_command(monkeypatch):
    """Serve starts another one in place of a proxy that is slow, as all are on a busy machine."""

    def died(**_: object) -> None:
        raise RayActorError

    config, clients = ServeConfig.read(default_config()), ["client", None]
    monkeypatch.setattr(serve, "start", died)
    monkeypatch.setattr(deploy, "serve_client", lambda: clients.pop(0))
    assert start_serve(config)[0] == "client"
    with pytest.raises(NotReadyError, match="controller died at its start"):
        start_serve(config)
