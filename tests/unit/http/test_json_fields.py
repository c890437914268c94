"""Small JSON bodies: objects only, within bytes and time."""

import asyncio
import gzip

import pytest
from fastapi import Request
from starlette.types import Message, Receive

from app.errors import (
    BadParameterError,
    BodyTooLargeError,
    SlowBodyError,
    UnsupportedCodingError,
)
from app.http.api import create_api
from app.http.json_fields import MAX_BYTES, read_fields
from tests.support.fakes import FakeService


async def read(receive: Receive, timeout_s: float = 60.0, coding: bytes = b"") -> dict:
    request = Request({"type": "http", "headers": [(b"content-encoding", coding)]}, receive)
    return await read_fields(request, timeout_s, BadParameterError, "a and b")


def body(*parts: bytes) -> Receive:
    left = list(parts)

    async def receive() -> Message:
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    return receive


async def test_an_object_in_parts() -> None:
    assert await read(body(b'{"a"', b": 1}")) == {"a": 1}


async def test_a_coded_body_is_inflated_or_refused() -> None:
    assert await read(body(gzip.compress(b'{"a": 1}')), coding=b"gzip") == {"a": 1}
    with pytest.raises(UnsupportedCodingError, match="send gzip, deflate"):
        await read(body(b"x"), coding=b"br")
    with pytest.raises(BodyTooLargeError):
        await read(body(gzip.compress(b" " * (MAX_BYTES + 1))), coding=b"gzip")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x", "the body is no JSON"),
        (b"", "the body is no JSON"),
        (b"[1]", "the body is no object; send a and b"),
    ],
)
async def test_what_is_no_object(content: bytes, message: str) -> None:
    with pytest.raises(BadParameterError, match=message):
        await read(body(content))


async def test_an_empty_body_may_stand_for_an_object() -> None:
    async def read_optional(content: bytes) -> dict:
        request = Request({"type": "http", "headers": []}, body(content))
        return await read_fields(request, 60.0, BadParameterError, "a and b", may_be_empty=True)

    assert await read_optional(b"") == {}
    with pytest.raises(BadParameterError, match="the body is no object; send a and b"):
        await read_optional(b"[]")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("put", "/v1/traffic"),
        ("post", "/v1/feedback"),
        ("post", "/v2/repository/index"),
        ("post", "/v2/repository/models/{model_name}/load"),
        ("post", "/v2/systemsharedmemory/region/{region_name}/register"),
    ],
)
def test_the_refusals_of_a_small_body_are_documented(method: str, path: str) -> None:
    documented = create_api(FakeService()).openapi()["paths"][path][method]["responses"]
    assert documented.keys() >= {"400", "408", "413", "415"}


async def test_a_body_over_the_limit() -> None:
    with pytest.raises(BodyTooLargeError):
        await read(body(b" " * MAX_BYTES, b"{}"))


async def test_a_body_that_does_not_come() -> None:
    async def receive() -> Message:
        return await asyncio.Future()

    with pytest.raises(SlowBodyError, match=r"the body had not arrived after 0\.01 s"):
        await read(receive, 0.01)
