"""Answers that did not wait for the body's end: the connection ends, unless the rest has come."""

import asyncio
from typing import Any

import pytest

from app.errors import CLOSE_HEADER
from app.http.api import create_api
from app.http.body import MAX_READS
from app.settings import Settings
from tests.support.fakes import FakeService

KEY = "k" * 32
LENGTH = (b"content-length", b"1000000")


class Upload:
    """A client that sends ``chunks``, and then nothing: not even the end if ``is_slow``."""

    def __init__(self, *chunks: bytes, is_slow: bool = True) -> None:
        self._chunks, self._is_slow = list(chunks), is_slow
        self.num_read = 0

    async def receive(self) -> dict[str, Any]:
        self.num_read += 1
        if not self._chunks:
            await asyncio.Future()
        body = self._chunks.pop(0)
        return {"type": "http.request", "body": body, "more_body": self._is_slow or self._chunks}


def status_and_headers(
    api: Any, upload: Upload, path: str, method: str = "POST", *more: tuple[bytes, bytes]
) -> tuple[int, dict[bytes, bytes]]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "query_string": b"",
        "headers": [*(more or (LENGTH,)), (b"x-request-id", b"r1")],
        "client": ("127.0.0.1", 9),
    }

    async def run() -> None:
        async with asyncio.timeout(20):
            await api(scope, upload.receive, send)

    asyncio.run(run())
    return sent[0]["status"], dict(sent[0]["headers"])


def is_closed(headers: dict[bytes, bytes]) -> bool:
    told = {headers.get(b"connection"), headers.get(CLOSE_HEADER.encode())}
    assert told in ({b"close", b"1"}, {None})
    return told != {None}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/nothing", 404),
        ("POST", "/healthz", 405),
        ("PUT", "/v1/classify", 405),
        ("GET", "/healthz", 200),
        ("POST", "/v2/models/nothing/infer", 404),
    ],
)
def test_a_route_that_reads_no_body(method: str, path: str, status: int) -> None:
    api = create_api(FakeService())
    found, headers = status_and_headers(api, Upload(b"begun"), path, method)
    assert (found, is_closed(headers)) == (status, True)
    found, headers = status_and_headers(api, Upload(b"all", is_slow=False), path, method)
    assert (found, is_closed(headers)) == (status, False)


def test_a_body_that_comes_and_comes_is_not_read_for_ever() -> None:
    upload = Upload(*(b"a" for _ in range(100)))
    _, headers = status_and_headers(create_api(FakeService()), upload, "/nothing")
    assert is_closed(headers)
    assert upload.num_read == MAX_READS


def test_a_request_that_is_refused_before_its_body() -> None:
    refused = (LENGTH, (b"x-request-timeout-seconds", b"5_0"))
    api = create_api(FakeService())
    found, headers = status_and_headers(api, Upload(), "/v1/classify", "POST", *refused)
    assert (found, is_closed(headers)) == (422, True)


def test_without_a_key_nothing_is_read(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(0o600)
    upload = Upload(b"all", is_slow=False)
    api = create_api(FakeService(Settings(api_keys_file=path)))
    found, headers = status_and_headers(api, upload, "/v1/classify")
    assert (found, is_closed(headers), upload.num_read) == (401, True, 0)


def test_who_waits_to_be_told_to_go_on_is_not_told() -> None:
    expects = (LENGTH, (b"expect", b"100-continue"))
    upload = Upload(b"all", is_slow=False)
    api = create_api(FakeService())
    found, headers = status_and_headers(api, upload, "/nothing", "POST", *expects)
    assert (found, is_closed(headers), upload.num_read) == (404, True, 0)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_was_read_keeps_its_connection(chunked: bool) -> None:
    length = (b"transfer-encoding", b"chunked") if chunked else (b"content-length", b"5")
    upload = Upload(b"ima", b"ge", is_slow=False)
    api = create_api(FakeService())
    found, headers = status_and_headers(api, upload, "/v1/classify", "POST", length)
    assert (found, is_closed(headers)) == (200, False)
