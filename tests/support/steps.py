"""A network that runs when the test says so, on a clock that the test moves."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.queueing.batch_queue import BatchQueue
from app.queueing.scheduler import BatchResult, BatchScheduler
from tests.support.queued_images import ImageFuture, submit


def image(number: int) -> NDArray[np.uint8]:
    """(4, 4, 3) uint8 that carries a number below 2**24."""
    return np.broadcast_to(
        np.array([number >> 16, number >> 8 & 255, number & 255], np.uint8), (4, 4, 3)
    )


def images(*numbers: int) -> list[NDArray[np.uint8]]:
    return [image(number) for number in numbers]


def number_of(result: BatchResult) -> int:
    high, middle, low = (int(v) for v in result.probabilities)
    return (high << 16) + (middle << 8) + low


async def settle() -> None:
    """Let every task run until it waits for something that the test has to do."""
    for _ in range(6):
        await asyncio.sleep(0)


async def begin(queue: BatchQueue, *numbers: int, **options: Any) -> list[ImageFuture]:
    """Submit images, let their batch begin if it may, and return their futures."""
    futures = submit(queue, images(*numbers), **options)
    await settle()
    return futures


class SteppedNetwork:
    """Gives each image's number back as its row; a batch with a ``bad`` one fails."""

    def __init__(self, bad: set[int] | None = None, max_running: int = 1) -> None:
        self.now = 0.0
        self.longest_s = 0.0  # of all runs
        self.bad = bad or set()
        self.batches: list[list[int]] = []
        self._max_running = max_running
        self._gates: list[asyncio.Future[None]] = []

    def clock(self) -> float:
        return self.now

    @property
    def num_running(self) -> int:
        return len(self._gates)

    @property
    def is_running(self) -> bool:
        return bool(self._gates)

    def finish(self) -> None:
        assert self._gates, "nothing runs"
        self._gates[0].set_result(None)

    async def finish_all(self) -> None:
        await settle()
        while self._gates:
            self.finish()
            await settle()

    async def run(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        assert len(self._gates) < self._max_running, "too many batches at once"
        rows = np.stack(images)[:, 0, 0].astype(np.float32)
        numbers = [(int(r[0]) << 16) + (int(r[1]) << 8) + int(r[2]) for r in rows]
        self.batches.append(numbers)
        started = self.now
        gate = asyncio.get_running_loop().create_future()
        self._gates.append(gate)
        try:
            await gate
        finally:
            self._gates.remove(gate)
            self.longest_s = max(self.longest_s, self.now - started)
        if self.bad.intersection(numbers):
            raise ValueError(f"cannot run {numbers}")
        return rows


def make_queue(network, max_batch_size=4, max_queued=64):
    return BatchQueue(network.run, range(1, max_batch_size + 1), max_queued, network.clock)


class SteppedQueues:
    """Queues of one scheduler, each with a network of its own; all by the first one's clock."""

    def __init__(
        self, num=1, num_places=1, *, num_ahead=0, threads_each=1, sizes=(1, 2, 4), shares=None
    ):
        self.scheduler = BatchScheduler(num_places, threads_each, num_ahead)
        self.networks = [SteppedNetwork(max_running=99) for _ in range(num)]
        self.taken: list[int] = []  # the queue of each batch, in order
        self.running: list[int] = []  # the queues of those that run, the longest first
        self._most = num_places + num_ahead
        self.queues = [
            BatchQueue(self._runs(n), sizes, 10_000, self.clock, self.scheduler, share=share)
            for n, share in enumerate(shares or [None] * num)
        ]

    def clock(self) -> float:
        return self.networks[0].now

    def tick(self, seconds: float = 1.0) -> None:
        """Let time pass, so that what comes next is younger."""
        self.networks[0].now += seconds

    def _runs(self, which: int) -> Callable[..., Awaitable[NDArray[np.float32]]]:
        async def run(batch: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
            assert len(self.running) < self._most, "too many batches at once"
            self.taken.append(which)
            self.running.append(which)
            try:
                return await self.networks[which].run(batch)
            finally:
                self.running.remove(which)

        return run

    @property
    def batches(self) -> list[list[list[int]]]:
        return [network.batches for network in self.networks]

    @property
    def sizes(self) -> list[list[int]]:
        return [[len(batch) for batch in network.batches] for network in self.networks]

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.queues))

    async def finish(self, which: int) -> None:
        """End the batch of a queue that has run for longest."""
        self.networks[which].finish()
        await settle()

    async def end_first(self) -> None:
        """End the batch that was taken first of those that run, if there is any."""
        await (self.finish(self.running[0]) if self.running else settle())

    async def finish_all(self) -> None:
        await settle()
        while self.running:
            await self.end_first()
