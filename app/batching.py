"""The batch queue: waits until the model is free, then takes what is there.

Unlike ``@serve.batch`` there is no timer: a lone image on an idle replica starts at once, and while
a batch runs the next one grows. One queue per network, in two lanes; one batch in flight.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from app.errors import DeadlineError, OverloadedError
from app.lanes import Lane, Lanes
from models.ensemble import Probabilities
from models.runtime import Pixels

RunBatch = Callable[[Pixels], Awaitable[Probabilities]]


class BatchResult(NamedTuple):
    """One image's part of a batch."""

    probabilities: Probabilities  # (C,)
    queued_s: float  # from submission to the start of its batch
    infer_s: float  # the batch's own run
    batch_size: int


@dataclass(slots=True)
class _Waiting:
    image: Pixels  # (H, W, 3)
    future: asyncio.Future[BatchResult]
    arrived: float
    expires: float

    def is_gone(self) -> bool:
        """Whether the caller went away, or was answered."""
        return self.future.done()


class BatchQueue:
    """A work-conserving queue in front of one network.

    ``run`` takes uint8 (N, H, W, 3), N from 1 to ``max_batch_size``, and gives float32 (N, C).
    Callers that went away or whose deadline passed are dropped when a batch is formed; when a batch
    fails, its images are run one by one, so that only the one at fault fails.
    """

    def __init__(
        self,
        run: RunBatch,
        max_batch_size: int,
        max_queued: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self.max_batch_size = max_batch_size  # both may be changed while the queue works
        self.max_queued = max_queued
        self._clock = clock
        self._waiting: Lanes[_Waiting] = Lanes()
        self._worker: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest_age_s(self) -> float:
        """How long the longest waiting image has waited; 0 when none waits."""
        arrived = (entry.arrived for entry in self._waiting if not entry.is_gone())
        return max(0.0, self._clock() - min(arrived, default=math.inf))

    def submit(
        self,
        images: Sequence[Pixels] | Pixels,
        timeout_s: float = math.inf,
        lane: Lane = "interactive",
    ) -> list[asyncio.Future[BatchResult]]:
        """Queue images (H, W, 3) and return one future for each; all of them fit or none is taken.

        ``timeout_s`` is the time left to them; one that has not started by then is dropped.

        Raises:
            OverloadedError: the queue has no room for them.
            DeadlineError: ``timeout_s`` is not a positive number.

        """
        if not timeout_s > 0:  # NaN too
            raise DeadlineError(f"timeout of {timeout_s} s: no time is left for this image")
        if len(images) > self.max_queued - len(self._waiting):
            self._waiting.forget_the_gone()
        if len(images) > self.max_queued - len(self._waiting):
            raise OverloadedError(
                f"{len(self._waiting)} images are queued, {len(images)} more do not fit into "
                f"{self.max_queued}; try again in a second"
            )
        loop, now = asyncio.get_running_loop(), self._clock()
        added = [_Waiting(i, loop.create_future(), now, now + timeout_s) for i in images]
        self._waiting.extend(added, lane)
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        return [entry.future for entry in added]

    async def _work(self) -> None:
        """Run batches until nothing waits, then end; the next submission starts it again."""
        try:
            while batch := self._take():
                await self._answer(batch)
        finally:
            self._worker = None

    def _take(self) -> list[_Waiting]:
        """Take the next entries that somebody still wants, up to a full batch."""
        batch: list[_Waiting] = []
        now = self._clock()
        while self._waiting and len(batch) < self.max_batch_size:
            entry = self._waiting.pop()
            if entry.is_gone():
                continue
            if entry.expires <= now:
                waited = now - entry.arrived
                entry.future.set_exception(
                    DeadlineError(f"the deadline passed after {waited:.3f} s in the queue")
                )
                continue
            batch.append(entry)
        return batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        started = self._clock()
        try:
            rows = await self._run(np.stack([entry.image for entry in batch]))
            if len(rows) != len(batch):
                raise RuntimeError(f"the network gave {len(rows)} rows for {len(batch)} images")
        except Exception as error:
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            for entry in batch:
                if not entry.future.done():
                    await self._answer([entry])
            return
        infer_s = self._clock() - started
        for entry, row in zip(batch, rows, strict=True):
            if not entry.future.done():  # cancelled meanwhile; setting it would raise
                waited = started - entry.arrived
                entry.future.set_result(BatchResult(row, waited, infer_s, len(batch)))


def _fail(entry: _Waiting, error: Exception) -> None:
    if not entry.future.done():
        entry.future.set_exception(error)
