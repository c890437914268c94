"""The server that Serve starts in a Gateway's replica: before the wrapper, and at its socket."""

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.serve._private import replica as serve_replica
from ray.serve._private.replica import Replica
from ray.serve.config import HTTPOptions

from app.deployments import replica_server
from app.deployments.plain_requests import PlainRequests, answer_plain_requests
from app.deployments.replica_server import ServerStart, can_pass, listen_for_haproxy
from app.environment import GATEWAY_SOCKETS, gateway_socket
from app.http.api import create_api
from app.launch.ports import free_port
from app.tracing.pipeline import pipeline
from tests.support.fakes import FakeService
from tests.support.serve_replicas import made_replica, real_replica


class AnsweringReplica(Replica):
    """Answers each request with what it knows of the client."""

    async def _direct_ingress_asgi(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await asyncio.sleep(0.3)
        body = json.dumps(scope["client"]).encode("ascii")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


class Started:
    """A server as Serve starts it."""

    def __init__(self, port: int, folder: Path, task: "asyncio.Task[None]", server: Any) -> None:
        self.port, self.path = port, gateway_socket(folder, port)
        self.task, self.server = task, server

    async def ask(self, *, by_socket: bool, path: str = "/") -> Any:
        uds = str(self.path) if by_socket else None
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=uds)) as client:
            says = {"x-forwarded-for": "10.0.0.9", "x-forwarded-proto": "https"}
            url = f"http://127.0.0.1:{self.port}{path}"
            return (await client.get(url, headers=says)).json()

    async def stop(self) -> None:
        self.server.should_exit = True
        await asyncio.wait_for(self.task, 10)


async def start(folder: Path, *, port: int | None = None) -> Started:
    replica = AnsweringReplica.__new__(AnsweringReplica)
    starting = ServerStart()
    starting.sockets = folder
    port = port or free_port()
    task, server = await starting(
        replica._direct_ingress_asgi,
        HTTPOptions(host="127.0.0.1", port=port),
        event_loop=asyncio.get_running_loop(),
    )
    for _ in range(500):
        if len(getattr(server, "servers", ())) == 2 or task.done():
            break
        await asyncio.sleep(0.01)
    return Started(port, folder, task, server)


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Started]:
    one = await start(tmp_path)
    yield one
    await one.stop()


async def test_it_listens_at_its_port_and_at_its_socket(started: Started) -> None:
    assert (await started.ask(by_socket=False))[0] == "127.0.0.1"
    assert await started.ask(by_socket=True) == ["127.0.0.1", 0]


async def test_who_is_being_answered_at_the_socket_when_it_stops_is_answered(
    started: Started,
) -> None:
    asked = asyncio.create_task(started.ask(by_socket=True, path="/slow"))
    await asyncio.sleep(0.1)
    await started.stop()
    assert (await asked)[0] == "127.0.0.1"
    with pytest.raises(httpx.ConnectError):
        await started.ask(by_socket=True)


async def test_what_a_dead_gateway_left_is_replaced(tmp_path: Path) -> None:
    port = free_port()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(gateway_socket(tmp_path, port)))
    one = await start(tmp_path, port=port)
    try:
        assert await one.ask(by_socket=True) == ["127.0.0.1", 0]
    finally:
        await one.stop()


# Serve leaves the TCP socket of a server that does not start to the garbage collector.
SERVES_SOCKET = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@SERVES_SOCKET
async def test_without_a_socket_it_does_not_start(tmp_path: Path) -> None:
    """HAProxy would find nobody there."""
    with pytest.raises(FileNotFoundError, match=r"TANDEM_GATEWAY_SOCKETS=off.*gone"):
        await start(tmp_path / "gone")
    await asyncio.sleep(0)
    gc.collect()


@SERVES_SOCKET
async def test_whoever_has_the_port_keeps_the_socket(started: Started) -> None:
    """Serve tries another port then."""
    with pytest.raises(RuntimeError, match="Failed to bind"):
        await start(started.path.parent, port=started.port)
    gc.collect()
    assert await started.ask(by_socket=True) == ["127.0.0.1", 0]


@pytest.mark.parametrize("value", ["/tmp/a-run", "off", None])
def test_the_folder_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    found = ServerStart()
    monkeypatch.setattr(replica_server, "server_start", found)
    monkeypatch.setattr(
        serve_replica, "start_asgi_http_server", serve_replica.start_asgi_http_server
    )
    monkeypatch.delenv(GATEWAY_SOCKETS, raising=False)
    if value:
        monkeypatch.setenv(GATEWAY_SOCKETS, value)
    listen_for_haproxy()
    assert found.sockets == (Path("/tmp/a-run") if value == "/tmp/a-run" else None)
    assert (serve_replica.start_asgi_http_server is found) is (found.sockets is not None)


async def no_middleware(*_) -> None:
    """Be one that an operator has added."""


@pytest.mark.parametrize(
    ("of_replica", "of_server", "can"),
    [
        ({}, {}, True),
        ({"_route_prefix": "/tandem"}, {}, False),
        ({"max_queued_requests": 0}, {}, False),
        ({"max_queued_requests": -1}, {}, True),
        (
            {"_user_callable_wrapper": SimpleNamespace(_run_user_code_in_separate_thread=True)},
            {},
            False,
        ),
        ({}, {"root_path": "/below"}, False),
        ({}, {"request_timeout_s": 5}, False),
        ({}, {"middlewares": [no_middleware]}, False),
    ],
)
def test_what_serves_wrapper_alone_can_do_is_left_to_it(of_replica, of_server, can):
    replica = SimpleNamespace(**vars(made_replica()) | of_replica)
    middlewares = of_server.pop("middlewares", [])
    options = HTTPOptions(**of_server)
    options.middlewares.extend(middlewares)
    assert can_pass(replica, options) is can


def test_an_exporter_of_the_operators_is_left_its_spans(monkeypatch):
    monkeypatch.setattr(replica_server, "is_tracing_enabled", lambda: True)
    monkeypatch.setattr(pipeline, "is_asked_for", False)
    assert not can_pass(made_replica(), HTTPOptions())  # type: ignore[arg-type]
    monkeypatch.setattr(pipeline, "is_asked_for", True)
    assert can_pass(made_replica(), HTTPOptions())  # type: ignore[arg-type]


async def test_the_server_of_serves_replica_gets_the_middleware(monkeypatch):
    started: list[HTTPOptions] = []

    async def start(app, options, **arguments) -> tuple[str, str]:
        assert arguments == {"enable_so_reuseport": False}
        started.append(options)
        return "task", "server"

    monkeypatch.setattr(serve_replica, "start_asgi_http_server", start)
    monkeypatch.setattr(replica_server, "server_start", ServerStart())
    api = create_api(FakeService())
    assert api.direct is not None
    for _ in range(2):  # again: a replica's application may be built anew
        answer_plain_requests(api.direct)
    real = real_replica()
    patched = serve_replica.start_asgi_http_server
    for app in (real._direct_ingress_asgi, no_middleware):
        told = await patched(app, HTTPOptions(), enable_so_reuseport=False)
        assert told == ("task", "server")
    of_replica, of_another = started
    assert [middleware.cls for middleware in of_replica.middlewares] == [PlainRequests]
    assert of_another.middlewares == []
