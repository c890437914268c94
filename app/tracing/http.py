"""ASGI middleware that names the request's span and returns its trace id."""

from opentelemetry import trace
from opentelemetry.trace import format_trace_id
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TRACE_ID_HEADER = b"x-trace-id"


class TracedRequests:
    """ASGI middleware around the interface; does nothing for a request that is not sampled."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = trace.get_current_span()
        if scope["type"] != "http" or not span.is_recording():
            await self._app(scope, receive, send)
            return
        trace_id = format_trace_id(span.get_span_context().trace_id).encode("ascii")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (TRACE_ID_HEADER, trace_id)]
                route = getattr(scope.get("route"), "path", None)
                span.update_name(f"{scope['method']} {route}" if route else scope["method"])
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        await self._app(scope, receive, send_with_id)
