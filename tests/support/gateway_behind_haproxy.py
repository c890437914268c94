"""The HTTP interface in a real uvicorn, and the real HAProxy before it as Serve configures it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import Receive, Scope, Send

from app.environment import HAPROXY_LOG, environment_value
from app.graph.service import EnsembleService
from app.http.api import create_api
from app.launch.checks import tls_of
from app.launch.haproxy import HaproxyCommand, _asked
from app.serve.replica import drop_trailers
from tests.support.haproxy_configs import write_serves_config
from tests.support.haproxy_process import running
from tests.support.services.processes import EVENTUALLY_S, wait_until


@contextmanager
def gateway_of(service: EnsembleService) -> Iterator[int]:
    """Run a Gateway's HTTP interface; yield its port."""
    drop_trailers()  # as every replica of the ingress
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
def haproxy_of(http, gateway, folder, own, options, keys=None, *, is_cluster=False):
    """Run HAProxy at the port of ``http`` before a Gateway, which it may not have asked yet.

    Args:
        http: has the files of TLS, too.
        gateway: the Gateway's port.
        folder: where its files are to be.
        own: the ports of its metrics and statistics.
        options: the values of the rules.
        keys: those that the service accepts; it follows their changes.
        is_cluster: whether it is a node's.

    """
    config = write_serves_config(
        folder / "haproxy.cfg",
        ports=own,
        http_port=http.port,
        replicas={"http": gateway},
        log_target=environment_value(HAPROXY_LOG) or "127.0.0.1:514",
    )
    command = HaproxyCommand(folder / "haproxy", None if is_cluster else own)
    command.write(options, tls=tls_of(http), keys=keys)
    over = threading.Event()
    follower = threading.Thread(target=command.follow_keys, args=(over,))
    with running(command, config):
        follower.start()
        try:
            yield
        finally:
            over.set()
            follower.join()


def num_asked(folder):
    """Return how many requests the HAProxy whose files are in ``folder`` has sent to Gateways."""
    return _statistics(folder, "http-tandem,one", 7)


def num_open(folder):
    """Return how many connections of HTTP's clients it has."""
    return _statistics(folder, "http_frontend,FRONTEND", 4)


def _statistics(folder, name, column):
    rows = _asked(folder / "admin.sock", b"show stat\n").splitlines()
    return sum(int(row.split(",")[column]) for row in rows if row.startswith(name))
