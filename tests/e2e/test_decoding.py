"""The process that decodes photos, in the real service: it comes, is killed, and comes again."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from app.bench.process_tree import DECODING, stage_of
from tests.support.services.live_service import Service, Start
from tests.support.services.processes import EVENTUALLY_S
from tests.support.tiny_networks import expected_label, picture, write_tiny_set

NUM_CLIENTS = 8


def decoding_pids(service: Service) -> list[int]:
    """Return the processes that decode for the service."""
    found = []
    for process in psutil.Process(service.process.pid).children(recursive=True):
        try:
            is_one = stage_of(process.cmdline()) == DECODING
        except psutil.Error:
            continue
        if is_one and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


@pytest.mark.slow  # a service of its own
def test_a_decoding_process_that_is_killed_costs_one_image_at_most(
    start_service: Start, tmp_path: Path
) -> None:
    """With networks that cost nothing: dear ones leave the event loop time to decode."""
    service = start_service("--model-set", str(write_tiny_set(tmp_path / "tiny")))
    service.wait_ready()
    photo, photo_label = picture("red", 100, suffix=".jpg"), expected_label("red")
    told: Counter[str] = Counter()

    async def client(http: httpx.AsyncClient, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            answer = await http.post(f"{service.url}/v1/classify", content=photo)
            said = answer.json()
            if "predictions" in said:
                told[said["predictions"][0]["label"]] += 1
            else:
                told[said["error"]["code"]] += 1

    async def another_than(pids: list[int]) -> list[int]:
        async with asyncio.timeout(EVENTUALLY_S):
            while not (new := [pid for pid in decoding_pids(service) if pid not in pids]):
                await asyncio.sleep(0.05)
        return new

    async def killed_amid_requests() -> None:
        is_over = asyncio.Event()
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            clients = [asyncio.create_task(client(http, is_over)) for _ in range(NUM_CLIENTS)]
            first = await another_than([])
            await asyncio.sleep(1)  # it decodes by now
            for pid in first:
                os.kill(pid, signal.SIGKILL)
            await another_than(first)
            await asyncio.sleep(1)
            is_over.set()
            await asyncio.gather(*clients)

    asyncio.run(killed_amid_requests())
    died = told.pop("decoding_died", 0)
    assert died <= 1, told
    assert set(told) == {photo_label}, told
    assert told[photo_label] > 2 * NUM_CLIENTS
