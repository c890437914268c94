"""The hostile corpus at a steady rate, from a process of its own."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import httpx
import machine  # noqa: F401 (makes tests.support importable)
from apart import apart

from tests.support.services.hostile import CORPUS, Hostile, hang_up, send

NUM_CALLERS = 32
# Bodies of 19 and 40 MB are sent in every fourth round: more of them would measure the copying.
HEAVY_EVERY = 4
COUNTING = threading.Lock()


@dataclass
class Flood:
    """What came of it."""

    rate: float
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        num_sent = sum(self.statuses.values())
        return {
            "asked_rate": self.rate,
            "rate": round(num_sent / self.seconds, 1) if self.seconds else 0.0,
            "sent": num_sent,
            "by_status": dict(sorted(self.statuses.items())),
            "otherwise_than_documented": dict(self.unexpected.most_common()),
        }


def flooding(url: str, rate: float) -> AbstractContextManager[dict[str, Any]]:
    """Send the corpus over and over while the block runs; the flood's figures are there after."""
    return apart(partial(_flood, url, rate), within_s=120)


def _flood(url: str, rate: float, pipe: Connection) -> dict[str, Any]:
    flood, started = Flood(rate), time.perf_counter()
    slots = threading.Semaphore(2 * NUM_CALLERS)
    pipe.send("begun")
    limits = httpx.Limits(max_connections=NUM_CALLERS)
    with (
        httpx.Client(base_url=url, timeout=60, limits=limits) as client,
        ThreadPoolExecutor(NUM_CALLERS) as callers,
    ):
        for number, hostile in enumerate(_endless()):
            wait = number / rate - (time.perf_counter() - started)
            if pipe.poll(max(0.0, wait)):
                break
            slots.acquire()  # a service that is behind is not sent more than it can hold
            callers.submit(_one, client, url, hostile, flood).add_done_callback(
                lambda _: slots.release()
            )
    flood.seconds = time.perf_counter() - started
    return flood.as_json()


def _endless() -> Iterator[Hostile | None]:
    """Yield the corpus in turn; None hangs up half-way."""
    for number in itertools.count():
        for hostile in (None, *CORPUS):
            if hostile is None or not hostile.is_heavy or number % HEAVY_EVERY == 0:
                yield hostile


def _one(client: httpx.Client, url: str, hostile: Hostile | None, flood: Flood) -> None:
    name, expected = (hostile.name, str(hostile.status)) if hostile else ("", "hung up")
    try:
        if hostile is None:
            hang_up(url)
            status = expected
        else:
            status = str(send(client, hostile).status_code)
    except (httpx.HTTPError, OSError) as error:
        status = type(error).__name__
    with COUNTING:
        flood.statuses[status] += 1
        if status != expected:
            flood.unexpected[f"{name}: {status}, not {expected}"] += 1
