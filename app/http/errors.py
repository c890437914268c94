"""Errors as HTTP responses: status, JSON form, ``Retry-After``, and their description in OpenAPI.

Also the headers of a request, looked up by name, with the request id that errors carry.
"""

from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from app.access import seconds
from app.answers import ErrorAnswer, Fault, as_json, error_answer, logged_fault
from app.errors import (
    LIMIT_HEADER,
    MAX_SHOWN,
    BadParameterError,
    OverloadedError,
    RateLimitedError,
    RouteError,
)
from app.http.body import Headers
from app.oip.models import ProtocolError
from models.errors import TandemError

RETRY_AFTER_S = 1  # for a service that is full or not ready
# Paths of the Open Inference Protocol and of KServe's V1, which have the same error form.
PROTOCOL_PATH, V1_MODEL = "/v2", "/v1/models/"


Responses = dict[int | str, dict[str, Any]]  # of a route by status, as FastAPI takes them


def described(form: type, description: str) -> dict[str, Any]:
    """Describe an error response by reference, not as ``model``.

    FastAPI builds the schema of each ``model`` anew, which took half of the interface's start. One
    response of each form has it, so that the description contains the form (504, below and in
    :mod:`app.http.open_inference`).
    """
    schema = {"$ref": f"#/components/schemas/{form.__name__}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def object_of(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Return the schema of an object with these fields."""
    of_required = {"required": [*required]} if required else {}
    return {"type": "object", **of_required, "properties": properties}


def array_of(items: dict[str, Any], **limits: int) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": items, **limits}


def json_body(
    schema: dict[str, Any], example: object = None, *, is_required: bool = True
) -> dict[str, Any]:
    """Return a route's ``openapi_extra`` for a body of JSON."""
    content = {"schema": schema} | ({} if example is None else {"example": example})
    required = {"required": True} if is_required else {}
    return {"requestBody": {**required, "content": {"application/json": content}}}


ERRORS: Responses = {
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
CODED: Responses = {
    400: described(ErrorAnswer, "a coded body that is damaged"),
    415: described(ErrorAnswer, "a Content-Encoding other than gzip and deflate"),
}


def add_error_handlers(api: FastAPI) -> None:
    """Render every error of a request in the service's JSON form."""

    async def render(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return _of_routing(request, error)
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            where = str(first["loc"][:2][-1])  # for example "query" and the parameter's name
            value = str(first.get("input"))[:MAX_SHOWN]
            error = BadParameterError(f"{where} is {value!r}: {first['msg']}; see /docs")
        return response_of(request.scope, error)

    for kind in (TandemError, RequestValidationError, HTTPException, Exception):
        api.add_exception_handler(kind, render)


def _of_routing(request: Request, error: HTTPException) -> Response:
    headers, detail = MutableHeaders(error.headers or {}), error.detail
    if error.status_code == 405:
        headers["allow"] = _allowed(request, headers.get("allow", ""))
        detail = f"{detail}, use {headers['allow']}"
    text = f"{request.method} {request.url.path}: {detail}; see /docs for what there is"
    answer = error_response(request.scope, Fault(error.status_code, RouteError.code, text))
    answer.headers.update(headers)
    return answer


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


def error_response(scope: Scope, fault: Fault) -> Response:
    """Return the answer for a request that failed as a whole."""
    headers = {}
    if fault.status in (429, 503):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if is_protocol(scope):
        answer = orjson.dumps(ProtocolError(fault.message))
    else:
        answer = as_json(error_answer(fault, Headers(scope).request_id))
    return Response(answer, fault.status, headers, "application/json")


def response_of(scope: Scope, error: Exception) -> Response:
    """Return the response for ``error``; errors of the service itself are logged."""
    answer = error_response(scope, logged_fault(error, Headers(scope).request_id))
    if isinstance(error, OverloadedError) and error.limits:
        answer.headers[LIMIT_HEADER] = ";".join(map(str, error.limits))
    if isinstance(error, RateLimitedError):
        answer.headers["retry-after"] = str(seconds(error.retry_after_s))
        answer.headers.update(error.headers)
    return answer
