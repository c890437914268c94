"""Ctrl-C while requests are under way: they are answered before anything stops."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.support.services.live_service import Service

NUM = 40


def test_what_is_under_way_is_answered(
    start_service: Callable[..., Service], photo: bytes, tmp_path: Path
) -> None:
    service = start_service()
    service.wait_ready()

    async def ask_and_stop() -> list[httpx.Response | BaseException]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            url = f"{service.url}/v1/classify"
            sent = [asyncio.create_task(client.post(url, content=photo)) for _ in range(NUM)]
            await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
            service.process.send_signal(signal.SIGINT)
            return await asyncio.gather(*sent, return_exceptions=True)

    answers = asyncio.run(ask_and_stop())
    told = [a.status_code if isinstance(a, httpx.Response) else repr(a) for a in answers]
    assert told == [200] * NUM
    assert service.process.wait(60) == 0
