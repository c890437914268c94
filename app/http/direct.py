"""Answers plain requests of POST /v1/classify before FastAPI sees them.

FastAPI describes the route and answers whatever is unusual about it. A request without parameters
that FastAPI would check takes this way past its router, dependencies and middlewares, which cost
more than the answer itself; the answers are the same (tests/unit/http/test_both_ways.py).
"""

import asyncio
import re
import time
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

PATH = "/v1/classify"
PLAIN_QUERY = re.compile(rb"(?:top_k=(\d{1,4}))?")


class TandemAPI(FastAPI):
    """The HTTP interface: FastAPI, but for plain requests of one route."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.direct: DirectClassify | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI has it."""
        if self.direct is not None and scope["type"] == "http":
            plain = PLAIN_QUERY.fullmatch(scope["query_string"])
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if plain and path == PATH and scope["method"] == "POST":
                top_k = int(plain[1]) if plain[1] else None
                await self.direct.answer(scope, receive, send, top_k)
                return
        await super().__call__(scope, receive, send)


class DirectClassify:
    """What FastAPI's middlewares, route and error handlers do, in one place."""

    def __init__(self, endpoint: ClassifyEndpoint, keys: Keys) -> None:
        self._endpoint, self._keys = endpoint, keys

    async def answer(self, scope: Scope, receive: Receive, send: Send, top_k: int | None) -> None:
        """Answer one request, count it and name its span."""
        started, status = time.perf_counter(), 500
        try:
            response, error = await self._response(scope, receive, top_k)
            status = response.status_code
            if error is None:
                span = trace.get_current_span()
                if span.is_recording():
                    note_response(span, f"POST {PATH}", status, response.raw_headers)
            await send(
                {
                    "type": "http.response.start",
                    "status": status,
                    "headers": response.raw_headers,
                }
            )
            await send({"type": "http.response.body", "body": response.body})
            if error is not None:
                raise error  # the server's log is to have it, as Starlette has it
        except asyncio.CancelledError:
            status = CLIENT_WENT
            raise
        finally:
            record_answered(PATH, status, (time.perf_counter() - started) * 1e3)

    async def _response(
        self, scope: Scope, receive: Receive, top_k: int | None
    ) -> tuple[Response, Exception | None]:
        """Return the response, and the error that nobody expected, if there was one."""
        headers = Headers(scope)
        try:
            if self._keys:
                check_keys(self._keys, scope)
            answer = await self._endpoint.answer(
                headers, receive, self._endpoint.default_top_k if top_k is None else top_k
            )
            return rendered(answer, headers.request_id), None
        except UnauthorizedError as error:
            return refusal(error, headers.request_id), None
        except TandemError as error:
            return response_of(error, headers.request_id), None
        except Exception as error:
            return unexpected_response(error, headers.request_id), error


def rendered(answer: bytes | Fault, request_id: str) -> Response:
    """Return the response of an endpoint's answer."""
    if isinstance(answer, Fault):
        return error_response(answer, request_id)
    return Response(answer, media_type="application/json")
