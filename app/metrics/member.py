"""Metrics of one member: executed batches, queue length and age, golden check."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.metrics.meter import meter
from app.metrics.table import (
    BATCHES,
    FAILED_BATCHES,
    FAILED_GOLDEN_CHECKS,
    GOLDEN_MS,
    GOLDEN_PASSED,
    MEMBER_IMAGES,
    QUEUE_AGE_MS,
    QUEUE_LENGTH,
)
from app.queueing.batch_records import ExecutedBatch, QueueReport

QUEUE_EVERY_S = 1.0


class MemberMetrics:
    """Hears of every batch; from the first one on looks at the queue every second, on its loop."""

    def __init__(self, member: str, report: Callable[[], QueueReport]) -> None:
        self._member, self._report = member, report
        self._is_watching = False

    def executed(self, batch: ExecutedBatch) -> None:
        """Count a batch that was run."""
        if not meter.is_on:
            return
        if batch.error is not None:
            meter.count(FAILED_BATCHES, member=self._member)
            return
        size = batch.size
        meter.count(BATCHES, member=self._member, size=str(size))
        meter.count(MEMBER_IMAGES, by=size, member=self._member)
        if not self._is_watching:
            self._is_watching = True
            self._watch()

    def _watch(self) -> None:
        report = self._report()
        meter.set(QUEUE_LENGTH, report.num_waiting, member=self._member)
        meter.set(QUEUE_AGE_MS, report.oldest_age_s * 1e3, member=self._member)
        asyncio.get_running_loop().call_later(QUEUE_EVERY_S, self._watch)


@contextmanager
def golden_recorded(member: str) -> Iterator[None]:
    """Record whether the block, a member's golden check, passed, and how long it took.

    A failure is told to Ray before the error goes on, which ends the replica: what Ray knows by
    then it exports when the process ends.
    """
    started = time.perf_counter()
    try:
        yield
    except Exception:
        meter.set(GOLDEN_PASSED, 0, member=member)
        meter.count(FAILED_GOLDEN_CHECKS, member=member)
        meter.flush()
        raise
    meter.set(GOLDEN_PASSED, 1, member=member)
    meter.set(GOLDEN_MS, (time.perf_counter() - started) * 1e3, member=member)
