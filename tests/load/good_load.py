"""Good requests at a steady rate, each answer compared with what the service said when idle."""

import asyncio
import time
from collections import Counter
from typing import Any

import aiohttp
import numpy as np

from app.bench.arrivals import poisson_arrivals

SEED = 20
TIMEOUT_S = 30.0
TOLERANCE = 0.01  # of a probability: a network's kernels differ with the size of the batch


class GoodLoad:
    """Photos, and what each of them is."""

    def __init__(self, url: str, photos: list[bytes], answers: list[tuple[str, float]]) -> None:
        self._url, self._photos, self._answers = url, photos, answers

    @classmethod
    async def learn(cls, url: str, photos: list[bytes]) -> "GoodLoad":
        """Ask for every photo once, one after the other."""
        async with _session() as session:
            answers = [await _ask(session, url, photo) for photo in photos]
        return cls(url, photos, answers)

    async def run(self, rate: float, seconds: float) -> dict[str, Any]:
        """Send Poisson arrivals; return counts, and latencies in ms from the scheduled time."""
        arrivals = poisson_arrivals(rate, seconds, SEED)
        fates: Counter[str] = Counter()
        latencies: list[float] = []
        started = time.perf_counter()
        async with _session() as session, asyncio.TaskGroup() as group:

            async def one(number: int, scheduled: float) -> None:
                fate = await self._fate(session, number)
                fates[fate] += 1
                if fate == "right":
                    latencies.append((time.perf_counter() - started - scheduled) * 1e3)

            for number, scheduled in enumerate(arrivals):
                await asyncio.sleep(max(0.0, scheduled - (time.perf_counter() - started)))
                group.create_task(one(number, scheduled))
        p50, p99 = (round(float(v), 1) for v in np.percentile(latencies or [0.0], (50, 99)))
        counts = {"sent": len(arrivals), **dict(fates.most_common())}
        return {"s": round(seconds, 1), **counts, "p50_ms": p50, "p99_ms": p99}

    async def _fate(self, session: aiohttp.ClientSession, number: int) -> str:
        index = number % len(self._photos)
        try:
            label, probability = await _ask(session, self._url, self._photos[index])
        except aiohttp.ClientResponseError as error:
            return f"http_{error.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"lost ({type(error).__name__})"
        expected, of_it = self._answers[index]
        is_right = label == expected and abs(probability - of_it) <= TOLERANCE
        return "right" if is_right else "wrong"


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), raise_for_status=True
    )


async def _ask(session: aiohttp.ClientSession, url: str, photo: bytes) -> tuple[str, float]:
    async with session.post(f"{url}/v1/classify?top_k=1", data=photo) as answer:
        (first,) = (await answer.json())["predictions"]
        return first["label"], first["probability"]
