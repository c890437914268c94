"""Answers plain requests of POST /v1/classify before FastAPI sees them.

FastAPI describes the route and answers whatever is unusual about it. A request without parameters
that FastAPI would check takes this way past its router, dependencies and middlewares, which cost
more than the answer itself; the answers are the same (tests/unit/http/test_both_ways.py). In a
replica most of them pass Serve's wrapper too (:mod:`app.deployments.plain_requests`).
"""

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from opentelemetry import trace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.errors import UnauthorizedError
from app.graph.keys import Keys
from app.http.auth import check_keys, refusal
from app.http.classify import ClassifyEndpoint
from app.http.errors import error_response, response_of, unexpected_response
from app.http.headers import Headers
from app.messages import Fault
from app.metrics.requests import CLIENT_WENT, record_answered
from app.tracing.http import note_response
from models.errors import TandemError

VERB, PATH = "POST", "/v1/classify"
ROUTE = f"{VERB} {PATH}"  # the span's name
PLAIN_QUERY = re.compile(rb"top_k=(\d{1,4})")  # or none at all
RawHeaders = list[tuple[bytes, bytes]]
Note = Callable[[int, RawHeaders], None]


class TandemAPI(FastAPI):
    """The HTTP interface: FastAPI, but for plain requests of one route."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.direct: DirectClassify | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI has it."""
        if self.direct is not None and is_plain(scope):
            await self.direct.answer(scope, Headers(scope), receive, send, note_on_span)
            return
        await super().__call__(scope, receive, send)


def is_plain(scope: Scope) -> bool:
    """Whether a request has nothing that FastAPI would check: its route's body and ``top_k``."""
    return (
        scope["type"] == "http"
        and scope["method"] == VERB
        and scope["path"].removeprefix(scope.get("root_path", "")) == PATH
        and (not scope["query_string"] or PLAIN_QUERY.fullmatch(scope["query_string"]) is not None)
    )


class JSONAnswer:
    """A response of status 200, as far as it is sent here; Starlette's costs three times that."""

    __slots__ = ("body", "raw_headers")

    status_code = 200

    def __init__(self, body: bytes) -> None:
        self.body = body
        length = b"%d" % len(body)
        self.raw_headers = [(b"content-length", length), (b"content-type", b"application/json")]


class DirectClassify:
    """What FastAPI's middlewares, route and error handlers do, in one place."""

    def __init__(self, endpoint: ClassifyEndpoint, keys: Keys) -> None:
        self._endpoint, self._keys = endpoint, keys

    async def answer(
        self, scope: Scope, headers: Headers, receive: Receive, send: Send, note: Note
    ) -> None:
        """Answer one plain request and count it.

        Args:
            scope: the request's, as those that follow are, of ASGI.
            headers: of ``scope``.
            receive: gives the body.
            send: takes the answer.
            note: called with the answer's status and headers before it is sent; it may add some.

        Raises:
            Exception: what nobody expected, after it was answered: the server's log is to have it,
                as Starlette has it.

        """
        started, status = time.perf_counter(), 500
        try:
            response, error = await self._response(scope, headers, receive)
            status, answered = response.status_code, response.raw_headers
            note(status, answered)
            await send({"type": "http.response.start", "status": status, "headers": answered})
            await send({"type": "http.response.body", "body": response.body})
            if error is not None:
                raise error
        except asyncio.CancelledError:
            status = CLIENT_WENT
            raise
        finally:
            record_answered(PATH, status, (time.perf_counter() - started) * 1e3)

    async def _response(
        self, scope: Scope, headers: Headers, receive: Receive
    ) -> tuple["Response | JSONAnswer", Exception | None]:
        """Return the response, and the error that nobody expected, if there was one."""
        try:
            if self._keys:
                check_keys(self._keys, scope)
            top_k = self._endpoint.default_top_k
            if (query := scope["query_string"]) and (plain := PLAIN_QUERY.fullmatch(query)):
                top_k = int(plain[1])
            answer = await self._endpoint.answer(headers, receive, top_k)
            if isinstance(answer, Fault):
                return error_response(answer, headers.request_id), None
            return JSONAnswer(answer), None
        except UnauthorizedError as error:
            return refusal(error, headers.request_id), None
        except TandemError as error:
            return response_of(error, headers.request_id), None
        except Exception as error:
            return unexpected_response(error, headers.request_id), error


def note_on_span(status: int, headers: RawHeaders) -> None:
    """Name the span that Serve has begun for the request, if it is sampled."""
    span = trace.get_current_span()
    if span.is_recording():
        note_response(span, ROUTE, status, headers)
