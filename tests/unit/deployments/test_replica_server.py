"""The server that Serve starts in a Gateway's replica, and what answers before the wrapper."""

from types import SimpleNamespace

import pytest
from ray.serve._private import replica as serve_replica
from ray.serve.config import HTTPOptions

from app.deployments import replica_server
from app.deployments.plain_requests import PlainRequests, answer_plain_requests
from app.deployments.replica_server import ServerStart, can_pass
from app.http.api import create_api
from app.tracing.pipeline import pipeline
from tests.support.fakes import FakeService
from tests.support.serve_replicas import made_replica, real_replica


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
