"""ASGI middleware that names the request's span and returns its trace id."""

from opentelemetry import trace
from opentelemetry.trace import Span, SpanContext, format_trace_id
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

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", None)
                name = f"{scope['method']} {route}" if route else scope["method"]
                headers = list(message.get("headers", ()))
                note_response(span, name, message["status"], headers)
                message["headers"] = headers
            await send(message)

        await self._app(scope, receive, send_with_id)


def note_response(span: Span, name: str, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    """Name a request's span, give it the status, and add its trace id to the headers."""
    headers.append(trace_id_header(span.get_span_context()))
    span.update_name(name)
    span.set_attribute("http.response.status_code", status)


def trace_id_header(span: SpanContext) -> tuple[bytes, bytes]:
    """Return the header that tells the client its request's trace id."""
    return TRACE_ID_HEADER, format_trace_id(span.trace_id).encode("ascii")
