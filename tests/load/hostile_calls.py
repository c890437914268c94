"""gRPC clients that mean harm, from a process of their own, and good calls to go beside them.

Large messages are no images, and whole; slow ones are large, and stop coming before or after what
HAProxy waits for. Each client calls again a second after it has its answer: to copy large messages
without a pause costs this process as much as the service.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc
import machine  # noqa: F401 (makes tests.support importable)
import psutil
from apart import apart
from good_load import TIMEOUT_S, Ask, GoodLoad, LostError

from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from tests.support.slow_relay import slow_relay

LARGE_BYTES = 18 * 10**6
GIVE_UP_S = 60.0  # a call that nobody ends by then
SAMPLE_S = 0.05
PAUSE_S = 1.0
# How many bytes of a message's connection pass at once; HAProxy waits for the first 15 KB.
KINDS = {"large": None, "stops half-way": LARGE_BYTES // 2, "does not begin": 5_000}
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))


@dataclass
class Calls:
    """How one kind's calls ended, and after how long."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        after_s = {"least": round(min(self.seconds), 1), "most": round(max(self.seconds), 1)}
        return {
            "calls": len(self.seconds),
            "ended_after_s": after_s,
            "by_status": dict(sorted(self.statuses.items())),
        }


@asynccontextmanager
async def over_grpc(port: int) -> AsyncIterator[Ask]:
    """Yield a function that sends a photo in a message."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ensemble = EnsembleStub(channel)

        async def ask(photo: bytes) -> tuple[str, float]:
            request = ClassifyRequest(images=[photo], top_k=1)
            try:
                reply = await ensemble.Classify(request, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise LostError(error.code().name) from error
            first = reply.results[0].classified.predictions[0]
            return first.label, first.probability

        yield ask


def hostile_calls(port: int, num_each: int) -> AbstractContextManager[dict[str, Any]]:
    """Let so many clients of each kind call while the block runs; their figures are there after."""
    return apart(partial(_attacked, port, num_each), within_s=2 * GIVE_UP_S)


def _attacked(port: int, num_each: int, pipe: Connection) -> dict[str, Any]:
    ends = asyncio.run(_attack(port, num_each, pipe))
    return {kind: calls.as_json() for kind, calls in ends.items() if calls.seconds}


async def _attack(port: int, num_each: int, pipe: Connection) -> dict[str, Calls]:
    ends, is_over = {kind: Calls() for kind in KINDS}, asyncio.Event()
    pipe.send("begun")
    async with asyncio.TaskGroup() as group:
        for kind, num_sent in KINDS.items():
            for _ in range(num_each):
                group.create_task(_client(port, num_sent, ends[kind], is_over))
        await asyncio.to_thread(pipe.recv)
        is_over.set()
    return ends


async def _client(port: int, num_sent: int | None, calls: Calls, is_over: asyncio.Event) -> None:
    request = ClassifyRequest(images=[bytes(LARGE_BYTES)])
    while not is_over.is_set():
        started = time.monotonic()
        if num_sent is None:
            status = await _call(port, request)
        else:
            async with slow_relay(port, num_sent) as relay:
                status = await _call(relay.port, request)
        calls.statuses[status] += 1
        calls.seconds.append(time.monotonic() - started)
        await asyncio.sleep(PAUSE_S)


async def _call(port: int, request: ClassifyRequest) -> str:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OWN_CONNECTION) as channel:
        try:
            reply = await EnsembleStub(channel).Classify(request, timeout=GIVE_UP_S)
        except grpc.aio.AioRpcError as error:
            told = dict(error.trailing_metadata() or ()).get("error-code", "nothing said")
            return f"{error.code().name} ({told})"
        return f"OK ({reply.results[0].error.code})"


def beside_calls(
    good: GoodLoad, port: int, gateway: psutil.Process, rate: float, seconds: float, num_each: int
) -> dict[str, Any]:
    """Run good calls alone and beside hostile ones; tell the most that the Gateway held."""
    calls = good.by(partial(over_grpc, port))
    alone = asyncio.run(_watched(calls, gateway, rate, seconds))
    with hostile_calls(port, num_each) as hostile:
        beside = asyncio.run(_watched(calls, gateway, rate, seconds))
    return {
        "num_of_each_kind": num_each,
        "good_alone": alone,
        "good_beside": beside,
        "hostile": hostile,
    }


async def _watched(
    good: GoodLoad, gateway: psutil.Process, rate: float, seconds: float
) -> dict[str, Any]:
    """Add the most memory (rss, in MB) that ``gateway`` held, by samples, to the load's figures."""
    running, most = asyncio.create_task(good.run(rate, seconds)), 0
    while not running.done():
        most = max(most, gateway.memory_info().rss)
        await asyncio.wait((running,), timeout=SAMPLE_S)
    return {**await running, "gateway_mb_at_most": round(most / 1e6, 1)}
