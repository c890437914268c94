"""Renders errors as HTTP responses: status, the JSON form, ``Retry-After``."""

import logging
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from app.errors import MAX_SHOWN, BadParameterError, OverloadedError
from app.http.headers import Headers
from app.messages import UNEXPECTED, Fault
from app.oip.documents import ProtocolError
from app.queueing.haproxy_headers import LIMIT_HEADER
from app.responses import ErrorAnswer, as_json, error_answer
from models.errors import TandemError

logger = logging.getLogger("ray.serve")
RETRY_AFTER_S = 1  # for a service that is full or not ready
# Paths of the Open Inference Protocol and of KServe's V1, which have the same error form.
PROTOCOL_PATH, V1_MODEL = "/v2", "/v1/models/"


def described(form: type, description: str) -> dict[str, Any]:
    """Describe an error response by reference, not as ``model``.

    FastAPI builds the schema of each ``model`` anew, which took half of the interface's start. One
    response of each form has it, so that the description contains the form (504, below and in
    :mod:`app.http.open_inference`).
    """
    schema = {"$ref": f"#/components/schemas/{form.__name__}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    400: described(ErrorAnswer, "not an image, or a damaged one"),
    401: described(ErrorAnswer, "no key of a service that wants one"),
    404: described(ErrorAnswer, "no such model set"),
    408: described(ErrorAnswer, "the body came too slowly"),
    413: described(ErrorAnswer, "too many bytes or files"),
    415: described(ErrorAnswer, "an image format that is not decoded"),
    422: described(ErrorAnswer, "too many pixels, or a bad parameter"),
    429: described(ErrorAnswer, "full; see Retry-After"),
    503: described(ErrorAnswer, "not ready"),
    504: {"model": ErrorAnswer, "description": "past its deadline"},
}

# Of a small JSON body.
CODED: dict[int | str, dict[str, Any]] = {
    400: described(ErrorAnswer, "a coded body that is damaged"),
    415: described(ErrorAnswer, "a Content-Encoding other than gzip and deflate"),
}


def add_error_handlers(api: FastAPI) -> None:
    """Render every error of a request in the service's JSON form."""

    async def tandem(request: Request, error: Exception) -> Response:
        assert isinstance(error, TandemError)
        return response_of(error, request_id_of(request), is_protocol=is_protocol(request.scope))

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = str(first["loc"][:2][-1])  # for example "query" and the parameter's name
        text = f"{where} is {str(first.get('input'))[:MAX_SHOWN]!r}: {first['msg']}; see /docs"
        fault = Fault(422, BadParameterError.code, text)
        return error_response(fault, request_id_of(request), is_protocol=is_protocol(request.scope))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.url.path}: {error.detail}; see /docs for what there is"
        fault = Fault(error.status_code, "http", text)
        answer = error_response(
            fault, request_id_of(request), is_protocol=is_protocol(request.scope)
        )
        answer.headers.update(error.headers or {})
        if error.status_code == 405:
            answer.headers["allow"] = _allowed(request, answer.headers.get("allow", ""))
        return answer

    async def unexpected(request: Request, error: Exception) -> Response:
        request_id = request_id_of(request)
        return unexpected_response(error, request_id, is_protocol=is_protocol(request.scope))

    api.add_exception_handler(TandemError, tandem)
    api.add_exception_handler(RequestValidationError, validation)
    api.add_exception_handler(HTTPException, http)
    api.add_exception_handler(Exception, unexpected)


def _allowed(request: Request, by_first: str) -> str:
    """Return the Allow header of a path (RFC 9110): Starlette's has its first route's methods."""
    methods = set(filter(None, by_first.replace(" ", "").split(",")))
    for route in request.app.routes:
        if route.matches(request.scope)[0] is Match.PARTIAL:
            methods |= getattr(route, "methods", None) or set()
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))


def is_protocol(scope: Scope) -> bool:
    """Whether a request belongs to one of KServe's protocols, which have their own error form."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == PROTOCOL_PATH or path.startswith((f"{PROTOCOL_PATH}/", V1_MODEL))


def error_response(fault: Fault, request_id: str, *, is_protocol: bool = False) -> Response:
    """Return the answer for a request that failed as a whole."""
    headers = {}
    if fault.status in (429, 503):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if is_protocol:
        answer = orjson.dumps(ProtocolError(fault.message))
    else:
        answer = as_json(error_answer(fault, request_id))
    return Response(answer, fault.status, headers, "application/json")


def response_of(error: TandemError, request_id: str, *, is_protocol: bool = False) -> Response:
    """Return the response for ``error``; internal errors are logged."""
    if error.status == UNEXPECTED.status:
        logger.error("request %s: %s", request_id, error.message, extra={"request_id": request_id})
    answer = error_response(Fault.of(error), request_id, is_protocol=is_protocol)
    if isinstance(error, OverloadedError) and error.limit is not None:
        answer.headers[LIMIT_HEADER] = str(error.limit)
    return answer


def unexpected_response(
    error: Exception, request_id: str, *, is_protocol: bool = False
) -> Response:
    """Return the response for an unexpected error, and log it."""
    extra = {"request_id": request_id}
    logger.error("request %s failed", request_id, exc_info=error, extra=extra)
    return error_response(UNEXPECTED, request_id, is_protocol=is_protocol)


def request_id_of(request: Request) -> str:
    """Return the request's X-Request-ID; see :attr:`app.http.headers.Headers.request_id`."""
    return Headers(request.scope).request_id
