"""Reads a small JSON object from a request's body, within limits of size and time."""

import asyncio
from typing import Any

import orjson
from fastapi import Request

from app.errors import SlowBodyError
from app.http.body import read_coded_body
from app.http.headers import Headers
from app.queueing.byte_budget import ByteBudget
from models.errors import TandemError

MAX_BYTES = 64 * 2**10


async def read_fields(
    request: Request,
    timeout_s: float,
    wrong: type[TandemError],
    wanted: str,
    *,
    may_be_empty: bool = False,
) -> dict[str, Any]:
    """Return the JSON object in a body of at most ``MAX_BYTES``, inflated if it is coded.

    Args:
        request: the request, whose body is still to come.
        timeout_s: the limit for the whole body.
        wrong: the class of the error for other content.
        wanted: the expected content, for that error's message.
        may_be_empty: whether an empty body is an object without fields.

    Raises:
        TandemError: an error of the class ``wrong``: the body is not a JSON object.
        SlowBodyError, BodyTooLargeError: it does not arrive in time, or is too large.
        BadCodingError, UnsupportedCodingError: its coding is damaged, or another one.

    """
    try:
        async with asyncio.timeout(timeout_s):
            with ByteBudget(2 * MAX_BYTES).share() as share:  # coded and inflated
                headers = Headers(request.scope)
                body = await read_coded_body(request.receive, headers, MAX_BYTES, share)
    except TimeoutError as error:
        text = f"the body had not arrived after {timeout_s:g} s; send it at once"
        raise SlowBodyError(text) from error
    if may_be_empty and not body:
        return {}
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise wrong(f"the body is no JSON: {error.msg}") from error
    if not isinstance(fields, dict):
        raise wrong(f"the body is no object; send {wanted}")
    return fields
