"""Good requests at a steady rate, each answer compared with what the service said when idle."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import grpc
import machine  # noqa: F401 (makes the project importable)
import numpy as np

from app.bench.load import poisson_arrivals
from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub

SEED = 20
TIMEOUT_S = 30.0
TOLERANCE = 0.01  # of a probability: a network's kernels differ with the size of the batch

Ask = Callable[[bytes], Awaitable[tuple[str, float]]]  # a photo's label and probability


class LostError(Exception):
    """A request without an answer; says how it ended."""


@asynccontextmanager
async def over_http(url: str, key: str = "") -> AsyncIterator[Ask]:
    """Yield a function that sends a photo as a body."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(
        timeout=timeout, raise_for_status=True, headers=headers
    ) as session:

        async def ask(photo: bytes) -> tuple[str, float]:
            try:
                async with session.post(f"{url}/v1/classify?top_k=1", data=photo) as answer:
                    (first,) = (await answer.json())["predictions"]
            except aiohttp.ClientResponseError as error:
                raise LostError(f"http_{error.status}") from error
            except (aiohttp.ClientError, TimeoutError) as error:
                raise LostError(f"lost ({type(error).__name__})") from error
            return first["label"], first["probability"]

        yield ask


@asynccontextmanager
async def over_grpc(port: int, key: str = "") -> AsyncIterator[Ask]:
    """Yield a function that sends a photo in a message."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        classify = EnsembleStub(channel).Classify
        metadata = (("authorization", f"Bearer {key}"),) if key else ()

        async def ask(photo: bytes) -> tuple[str, float]:
            try:
                request = ClassifyRequest(images=[photo], top_k=1)
                reply = await classify(request, timeout=TIMEOUT_S, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise LostError(error.code().name) from error
            first = reply.results[0].classified.predictions[0]
            return first.label, first.probability

        yield ask


class GoodLoad:
    """Photos, and what each of them is; ``client`` gives a way to ask."""

    def __init__(self, client, photos, answers):
        self._client, self._photos, self._answers = client, photos, answers

    @classmethod
    async def learn(cls, client, photos):
        """Ask for every photo once, one after the other."""
        async with client() as ask:
            answers = [await ask(photo) for photo in photos]
        return cls(client, photos, answers)

    def by(self, client: Callable[[], AbstractAsyncContextManager[Ask]]) -> "GoodLoad":
        """Return the same load, which asks in another way."""
        return GoodLoad(client, self._photos, self._answers)

    async def run(self, rate: float, seconds: float) -> dict[str, Any]:
        """Send Poisson arrivals; return counts, and latencies in ms from the scheduled time."""
        arrivals = poisson_arrivals(rate, seconds, SEED) if seconds else []
        fates: Counter[str] = Counter()
        latencies: list[float] = []
        started = time.perf_counter()
        async with self._client() as ask, asyncio.TaskGroup() as group:

            async def one(number: int, scheduled: float) -> None:
                fate = await self._fate(ask, number)
                fates[fate] += 1
                if fate == "right":
                    latencies.append((time.perf_counter() - started - scheduled) * 1e3)

            for number, scheduled in enumerate(arrivals):
                await asyncio.sleep(max(0.0, scheduled - (time.perf_counter() - started)))
                group.create_task(one(number, scheduled))
        p50, p99 = (round(float(v), 1) for v in np.percentile(latencies or [0.0], (50, 99)))
        counts = {"sent": len(arrivals), **dict(fates.most_common())}
        return {"s": round(seconds, 1), **counts, "p50_ms": p50, "p99_ms": p99}

    async def _fate(self, ask: Ask, number: int) -> str:
        index = number % len(self._photos)
        try:
            label, probability = await ask(self._photos[index])
        except LostError as error:
            return str(error)
        expected, of_it = self._answers[index]
        is_right = label == expected and abs(probability - of_it) <= TOLERANCE
        return "right" if is_right else "wrong"
