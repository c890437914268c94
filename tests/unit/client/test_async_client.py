"""The client for asyncio: as the blocking one, on a loop whose clock jumps."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from app.http.api import create_api
from tandem_client import AsyncClient, BadImage, DeadlineExceeded, Overloaded, Unreachable
from tests.support.http_server import classified
from tests.support.scripted_service import ScriptedService, answered, refused
from tests.support.virtual_loop import run_virtually


def asked(
    ask: Callable[[AsyncClient], Awaitable[Any]], service: ScriptedService, **options
) -> tuple[Any, float]:
    """Return what ``ask`` returns or raises, and how many seconds that took."""

    async def run() -> tuple[Any, float]:
        loop = asyncio.get_running_loop()
        async with AsyncClient("http://tandem", transport=service.transport, **options) as client:
            started = loop.time()
            try:
                said = await ask(client)
            except Exception as error:
                said = error
            return said, loop.time() - started

    return run_virtually(run())


def test_an_answer_and_what_was_sent():
    service = ScriptedService(answered("church"))
    said, _ = asked(lambda c: c.classify(b"photo", top_k=2), service, api_key="k" * 32)
    assert said.label == "church"
    (request,) = service.requests
    assert (request.content, request.url.query) == (b"photo", b"top_k=2")
    assert request.headers["authorization"] == f"Bearer {'k' * 32}"


def test_what_was_refused_is_sent_again_after_retry_after():
    service = ScriptedService(refused(retry_after="2"), refused(503, "not_ready", retry_after="3"))
    said, took_s = asked(lambda c: c.classify(b"photo"), service)
    assert said.label == "tench"
    assert 5.0 <= took_s <= 5.4


def test_it_gives_up_rather_than_wait_past_its_deadline():
    service = ScriptedService(*[refused(retry_after="4")] * 9)
    said, took_s = asked(lambda c: c.classify(b"photo", timeout=10), service)
    assert isinstance(said, Overloaded)
    assert took_s < 10
    assert len(service.requests) == 3


@pytest.mark.parametrize("trickles", [True, False])
def test_a_service_that_does_not_answer_has_the_calls_time_and_no_more(trickles):
    async def hang(request: httpx.Request) -> httpx.Response:
        async def chunks():
            while True:
                await asyncio.sleep(1)
                yield b" "

        if trickles:
            return httpx.Response(200, content=chunks())
        await asyncio.sleep(3600)
        raise AssertionError("it waited an hour")

    service = ScriptedService()
    service.transport = httpx.MockTransport(hang)
    said, took_s = asked(lambda c: c.classify(b"photo", timeout=7), service)
    assert isinstance(said, DeadlineExceeded)
    assert took_s == pytest.approx(7)


def test_a_connection_that_ends_is_made_again():
    service = ScriptedService(httpx.ReadError("reset"))
    said, _ = asked(lambda c: c.classify(b"photo"), service)
    assert said.label == "tench"
    service = ScriptedService(*[httpx.ConnectError("refused")] * 9)
    said, _ = asked(lambda c: c.classify(b"photo"), service)
    assert isinstance(said, Unreachable)
    assert len(service.requests) == 5


async def test_files_and_forms(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"first")
    rows = {"results": [classified("church"), classified()], "request_id": "r"}
    service = ScriptedService(answered(), httpx.Response(200, json=rows))
    async with AsyncClient("http://tandem", transport=service.transport) as client:
        assert (await client.classify(tmp_path / "a.jpg")).label == "tench"
        first, second = await client.classify([tmp_path / "a.jpg", b"second"])
        with pytest.raises(BadImage, match="cannot read"):
            await client.classify(tmp_path / "nowhere.jpg")
    assert (first.get().label, second.get().label) == ("church", "tench")
    assert service.requests[0].content == b"first"
    assert repr(client) == "AsyncClient('http://tandem')"


async def test_it_is_answered_by_the_services_own_code(service):
    """The application itself, in this process: its fields, its errors, its form."""
    transport: Any = httpx.ASGITransport(create_api(service), raise_app_exceptions=False)
    service.skipped = ["b"]
    async with AsyncClient("http://tandem", transport=transport) as client:
        answer = await client.classify(b"image a", top_k=2, timeout=4, priority=6)
        good, bad = await client.classify([b"image a", b"no"])
        with pytest.raises(BadImage) as caught:
            await client.classify(b"no")
    assert answer.label == "image a"
    assert answer.skipped_members == ("b",)
    assert answer.raw["timings_ms"]["total"] == answer.timings.total_ms
    assert good.get().label == "image a"
    assert (bad.error.code, caught.value.status) == ("not_an_image", 400)
    one, form, _ = service.requests
    assert (one.top_k, one.timeout_s, one.lane) == (2, pytest.approx(3.6, abs=0.1), "bulk")
    assert form.files == [b"image a", b"no"]
