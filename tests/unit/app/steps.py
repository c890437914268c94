"""A network that runs when the test says so, on a clock that the test moves."""

import asyncio

import numpy as np
from numpy.typing import NDArray

from app.batching import BatchResult


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

    def __init__(self, bad: set[int] | None = None) -> None:
        self.now = 0.0
        self.bad = bad or set()
        self.batches: list[list[int]] = []
        self._gate: asyncio.Future[None] | None = None

    def clock(self) -> float:
        return self.now

    @property
    def is_running(self) -> bool:
        return self._gate is not None

    def finish(self) -> None:
        assert self._gate is not None, "nothing runs"
        self._gate.set_result(None)

    async def finish_all(self) -> None:
        await settle()
        while self._gate is not None:
            self.finish()
            await settle()

    async def run(self, batch: NDArray[np.uint8]) -> NDArray[np.float32]:
        assert self._gate is None, "two batches at once"
        rows = batch[:, 0, 0].astype(np.float32)
        numbers = [(int(r[0]) << 16) + (int(r[1]) << 8) + int(r[2]) for r in rows]
        self.batches.append(numbers)
        self._gate = asyncio.get_running_loop().create_future()
        try:
            await self._gate
        finally:
            self._gate = None
        if self.bad.intersection(numbers):
            raise ValueError(f"cannot run {numbers}")
        return rows
