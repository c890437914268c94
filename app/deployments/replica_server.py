"""The HTTP server of a Gateway's replica: what is added to it when Serve starts it.

Serve starts it when it has made the ingress and its ASGI application, by a function of its own
module, which is replaced here: plain requests are answered before Serve's wrapper
(:func:`put_before_wrapper`). The names are listed in :mod:`app.calls.ray_features`, and looked up
at start.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from ray.serve._private import replica as serve_replica
from ray.serve._private.replica import Replica
from ray.serve._private.tracing_utils import is_tracing_enabled
from starlette.middleware import Middleware

from app.deployments.serve_replica import ServeReplica
from app.tracing.pipeline import pipeline

ROOT = "/"
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

    """

    def __init__(self) -> None:
        self._start: Callable[..., Awaitable[Any]] = serve_replica.start_asgi_http_server  # type: ignore[attr-defined]
        self.before_wrapper: tuple[str, str, MakeMiddleware] | None = None

    async def __call__(self, app: Any, options: Any, **arguments: Any) -> Any:
        """Start it; the arguments are Serve's, and what it returns: a task, and the server."""
        replica = getattr(app, "__self__", None)
        if not isinstance(replica, Replica):
            return await self._start(app, options, **arguments)
        if self.before_wrapper is not None and can_pass(replica, options):
            verb, path, middleware = self.before_wrapper
            ours = ServeReplica(replica, verb, path)
            options.middlewares.append(middleware(ours))  # the list is this server's own
        return await self._start(app, options, **arguments)


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
    serve_replica.start_asgi_http_server = server_start  # type: ignore[attr-defined, assignment]
