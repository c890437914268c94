"""The HTTP server of a Gateway's replica: what is added to it when Serve starts it.

Serve starts it when it has made the ingress and its ASGI application, by a function of its own
module, which is replaced here. Plain requests are answered before Serve's wrapper
(:func:`put_before_wrapper`), and HAProxy, if it is on the same machine, comes by a socket that is a
file instead of a TCP port (:func:`listen_for_haproxy`). The names are listed in
:mod:`app.calls.ray_names`, and looked up at start.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from ray.serve._private import replica as serve_replica
from ray.serve._private.replica import Replica
from ray.serve._private.tracing_utils import is_tracing_enabled
from starlette.middleware import Middleware

from app.deployments.serve_replica import ServeReplica
from app.environment import gateway_socket, gateway_sockets
from app.tracing.pipeline import pipeline

ROOT = "/"
HAPROXY = "127.0.0.1", 0  # who the client is, as over TCP: HAProxy, on this machine
MakeMiddleware = Callable[[ServeReplica], Middleware]


def can_pass(replica: Replica, options: Any) -> bool:
    """Whether plain requests can pass Serve's wrapper as this service is set up.

    What its wrapper would do, and :class:`ServeReplica` does not, leaves them to it: a timeout of
    Serve's, paths below a prefix, an HTTP middleware or a trace exporter of the operator's, a
    thread for the application.

    Args:
        replica: Serve's replica.
        options: of its HTTP server.

    """
    return (
        replica._route_prefix == ROOT
        and replica.max_queued_requests != 0
        and not options.root_path
        and not options.request_timeout_s
        and not options.middlewares
        and not replica._user_callable_wrapper._run_user_code_in_separate_thread
        and (pipeline.is_asked_for or not is_tracing_enabled())
    )


class ServerStart:
    """Starts the server of this process's replica, in place of Serve's function.

    Attributes:
        before_wrapper: a middleware, as :func:`put_before_wrapper` has it.
        sockets: the folder for a socket at which it listens too; None: at its port alone.

    """

    def __init__(self) -> None:
        self._start: Callable[..., Awaitable[Any]] = serve_replica.start_asgi_http_server  # type: ignore[attr-defined]
        self.before_wrapper: tuple[str, str, MakeMiddleware] | None = None
        self.sockets: Path | None = None

    async def __call__(self, app: Any, options: Any, **arguments: Any) -> Any:
        """Start it; the arguments are Serve's, and what it returns: a task, and the server."""
        replica = getattr(app, "__self__", None)
        if not isinstance(replica, Replica):
            return await self._start(app, options, **arguments)
        if self.before_wrapper is not None and can_pass(replica, options):
            verb, path, middleware = self.before_wrapper
            ours = ServeReplica(replica, verb, path)
            options.middlewares.append(middleware(ours))  # the list is this server's own
        task, server = await self._start(app, options, **arguments)
        if self.sockets is not None:  # the port is ours, and so is the socket that is named for it
            try:
                listen_at(server, bound_socket(gateway_socket(self.sockets, options.port)))
            except OSError:
                task.cancel()
                raise
        return task, server


def bound_socket(path: Path) -> socket.socket:
    """Return a socket whose name is the file ``path``; one that was there before goes.

    Raises:
        OSError: there can be none, so HAProxy would find nobody; the replica does not start.

    """
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(str(path))
    except OSError as error:
        made.close()
        told = f"{error.strerror}: no socket for HAProxy; TANDEM_GATEWAY_SOCKETS=off does without"
        raise OSError(error.errno, told, str(path)) from error
    return made


def listen_at(server: uvicorn.Server, bound: socket.socket) -> None:
    """Let a server that is about to start listen at a Unix-domain socket too.

    Its connections are the server's like others, also when it is stopped.
    """
    # Nobody in front says for whom it asks, and what a client says of itself is no fact.
    server.config.proxy_headers = False
    startup = server.startup

    async def start_both(sockets: Any = None) -> None:
        await startup(sockets)
        loop, backlog = asyncio.get_running_loop(), server.config.backlog
        added = await loop.create_unix_server(_protocol(server), sock=bound, backlog=backlog)
        server.servers.append(added)

    server.startup = start_both  # type: ignore[method-assign]


def _protocol(server: uvicorn.Server) -> Callable[[], asyncio.Protocol]:
    """Return what makes the protocol of a connection, as uvicorn does for its own."""
    config = server.config
    base: Any = config.http_protocol_class

    class FromHAProxy(base):  # type: ignore[misc]  # known to uvicorn's configuration alone
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.client = HAPROXY

    def make() -> asyncio.Protocol:
        made: asyncio.Protocol = FromHAProxy(
            config=config, server_state=server.server_state, app_state=server.lifespan.state
        )
        return made

    return make


server_start = ServerStart()


def put_before_wrapper(verb: str, path: str, middleware: MakeMiddleware) -> None:
    """Let the server of this process's replica call a middleware before Serve's wrapper.

    To call this again replaces the middleware.

    Args:
        verb: the method of the requests that it answers.
        path: their path.
        middleware: makes it for the replica; not called where :func:`can_pass` says no.

    """
    server_start.before_wrapper = verb, path, middleware
    _install()


def listen_for_haproxy() -> None:
    """Let the server of this process's replica listen where HAProxy of the same run looks for it.

    Over a Unix-domain socket a request of 10 KB costs half of what it does over TCP on loopback
    (DECISIONS.md). Does nothing in a cluster, whose HAProxies reach Gateways on every node.
    """
    if (folder := gateway_sockets()) is not None:
        server_start.sockets = folder
        _install()


def _install() -> None:
    serve_replica.start_asgi_http_server = server_start  # type: ignore[attr-defined, assignment]
