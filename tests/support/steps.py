"""A network that runs when the test says so, on a clock that the test moves."""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.queueing.batch_queue import BatchQueue
from app.queueing.scheduler import BatchResult


def image(number: int) -> NDArray[np.uint8]:
    """(4, 4, 3) uint8 that carries a number below 2**24."""
    return np.broadcast_to(
        np.array([number >> 16, number >> 8 & 255, number & 255], np.uint8), (4, 4, 3)
    )


def number_of(result: BatchResult) -> int:
    high, middle, low = (int(v) for v in result.probabilities)
    return (high << 16) + (middle << 8) + low


async def settle() -> None:
    """Let every task run until it waits for something that the test has to do."""
    for _ in range(6):
        await asyncio.sleep(0)


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
