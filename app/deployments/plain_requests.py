"""Passes plain requests of POST /v1/classify by Serve's wrapper of a replica.

The wrapper makes a request's metadata from all its headers, runs it behind three context managers
and two middlewares of its own, and holds a span of the SDK's. Answers, spans and Serve's metrics
are the same without it (tests/e2e/traced/test_direct_requests.py); what that brings,
tests/load/direct_requests.py measures.
"""

import asyncio
import logging
import time

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.deployments.replica_server import put_before_wrapper
from app.deployments.serve_replica import ServeReplica
from app.http.direct import PATH, ROUTE, VERB, DirectClassify, RawHeaders, is_plain
from app.http.headers import REQUEST_ID, Headers, new_request_id
from app.metrics.requests import CLIENT_WENT
from app.tracing.http import trace_id_header
from app.tracing.request_span import RequestSpan, RequestTracer

# Set by our HAProxy alone, which removes what else Serve's wrapper would read: a timeout, a
# session, a multiplexed model, identities that are no text (app/launch/haproxy/edits.py).
BY_HAPROXY = b"x-request-disconnect-disabled", "?1"
logger = logging.getLogger("ray.serve")


def answer_plain_requests(direct: DirectClassify) -> None:
    """Let ``direct`` answer what is plain before Serve's wrapper, in this process's replica."""

    def middleware(replica: ServeReplica) -> Middleware:
        tracer = RequestTracer.of_process(replica.span_name)
        return Middleware(PlainRequests, replica=replica, direct=direct, tracer=tracer)

    put_before_wrapper(VERB, PATH, middleware)


class PlainRequests:
    """ASGI middleware before Serve's own, which answers plain requests and passes on the others.

    Args:
        app: Serve's.
        replica: what Serve is to know of the requests.
        direct: answers them.
        tracer: begins their spans; None: tracing is off.

    """

    def __init__(
        self,
        app: ASGIApp,
        replica: ServeReplica,
        direct: DirectClassify,
        tracer: RequestTracer | None,
    ) -> None:
        self._app, self._replica, self._direct, self._tracer = app, replica, direct, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_plain(scope):
            headers = Headers(scope)
            if headers.get(BY_HAPROXY[0]) == BY_HAPROXY[1] and self._replica.has_place():
                await self._answer(headers, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _answer(self, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        request_id = headers.text(REQUEST_ID)
        if not request_id:
            request_id = new_request_id()
            scope["headers"] = [*scope["headers"], (REQUEST_ID, request_id.encode("ascii"))]
            headers = Headers(scope)
        span = self._begin_span(headers)
        status = 500
        error: BaseException | None = None

        def note(answered: int, answer: RawHeaders) -> None:
            nonlocal status
            status = answered
            if span is not None:
                answer.append(trace_id_header(span.context))
            answer.append((REQUEST_ID, request_id.encode("latin-1")))

        internal_id = await self._replica.take_place(request_id)
        try:
            await self._direct.answer(scope, headers, receive, send, note)
        except asyncio.CancelledError as cancelled:  # ends here, as in Serve's wrapper
            status, error = CLIENT_WENT, cancelled
            self._replica.cancel_calls(internal_id, cancelled)
        except Exception as unexpected:
            error = unexpected
            logger.exception("Request failed.")
        finally:
            self._replica.leave_place()
        self._replica.record(status, (time.perf_counter() - started) * 1e3, error)
        if span is not None:
            span.end(ROUTE, self._replica.span_attributes(request_id, status))

    def _begin_span(self, headers: Headers) -> RequestSpan | None:
        if self._tracer is None:
            return None
        return self._tracer.begin(headers.get(b"traceparent"), headers.get(b"tracestate"))
