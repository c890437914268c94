"""The HTTP interface in a real uvicorn, and the real HAProxy before it as Serve configures it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import Receive, Scope, Send

from app.graph.service import EnsembleService
from app.http.api import create_api
from app.launch.checks import tls_of
from app.launch.haproxy import HaproxyCommand
from tests.support.haproxy_configs import write_serves_config
from tests.support.haproxy_process import running
from tests.support.services.processes import EVENTUALLY_S, wait_until


@contextmanager
def gateway_of(service: EnsembleService) -> Iterator[int]:
    """Run a Gateway's HTTP interface; yield its port."""
    api = create_api(service)

    async def as_serve_has_it(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/-/healthz":  # HAProxy's own check
            scope["path"] = "/healthz"
        if scope["type"] == "http":
            await api(scope, receive, send)

    config = uvicorn.Config(as_serve_has_it, port=0, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, EVENTUALLY_S, "uvicorn starts")
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def haproxy_of(http, gateway, folder, own, options):
    """Run HAProxy at the port of ``http`` before a Gateway, which it may not have asked yet.

    Args:
        http: has the files of TLS, too.
        gateway: the Gateway's port.
        folder: where its files are to be.
        own: the ports of its metrics and statistics.
        options: the values of the rules.

    """
    config = write_serves_config(
        folder / "haproxy.cfg", ports=own, http_port=http.port, replicas={"http": gateway}
    )
    command = HaproxyCommand(folder / "haproxy", own)
    command.write(options, tls=tls_of(http))
    with running(command, config):
        yield
