"""Reads a small body of a request, such as a JSON object, within limits of size and time."""

import asyncio
from typing import Any

import orjson
from starlette.types import Receive

from app.errors import SlowBodyError
from app.http.body import read_coded_body
from app.http.headers import Headers
from app.queueing.byte_budget import ByteBudget
from models.errors import TandemError

MAX_BYTES = 64 * 2**10


async def read_small_body(receive: Receive, headers: Headers, timeout_s: float) -> bytes:
    """Return a body of at most ``MAX_BYTES``, inflated if it is coded.

    Args:
        receive: of ASGI.
        headers: the request's.
        timeout_s: the limit for the whole body.

    Raises:
        SlowBodyError, BodyTooLargeError: it does not arrive in time, or is too large.
        BadCodingError, UnsupportedCodingError: its coding is damaged, or another one.

    """
    try:
        async with asyncio.timeout(timeout_s):
            with ByteBudget(2 * MAX_BYTES).share() as share:  # coded and inflated
                return await read_coded_body(receive, headers, MAX_BYTES, share)
    except TimeoutError as error:
        text = f"the body had not arrived after {timeout_s:g} s; send it at once"
        raise SlowBodyError(text) from error


async def read_fields(
    receive: Receive, headers: Headers, timeout_s: float, wrong: type[TandemError], wanted: str
) -> dict[str, Any]:
    """Return the JSON object in a body.

    Args:
        receive: of ASGI.
        headers: the request's.
        timeout_s: the limit for the whole body.
        wrong: the class of the error for other content.
        wanted: the expected content, for that error's message.

    Raises:
        TandemError: an error of the class ``wrong``: the body is not a JSON object.
        SlowBodyError, BodyTooLargeError: it does not arrive in time, or is too large.

    """
    body = await read_small_body(receive, headers, timeout_s)
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise wrong(f"the body is no JSON: {error.msg}") from error
    if not isinstance(fields, dict):
        raise wrong(f"the body is no object; send {wanted}")
    return fields
