"""Metrics of a member: executed batches, queue length and age, golden check."""

import asyncio
import time
from collections.abc import Callable

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
Reports = dict["MemberMetrics", QueueReport]  # the last report of each queue


class MemberMetrics:
    """Records every batch; after the first, samples the queue every second on the event loop.

    ``alike`` are the queues of this member in all loaded versions.
    """

    def __init__(
        self, member: str, report: Callable[[], QueueReport], alike: Reports | None = None
    ) -> None:
        self._member, self._report = member, report
        self._alike: Reports = {} if alike is None else alike
        self._watching: asyncio.TimerHandle | None = None
        self._is_closed = False

    def executed(self, batch: ExecutedBatch) -> None:
        if not meter.is_on:
            return
        if batch.error is not None:
            meter.count(FAILED_BATCHES, member=self._member)
            return
        size = batch.size
        meter.count(BATCHES, member=self._member, size=str(size))
        meter.count(MEMBER_IMAGES, by=size, member=self._member)
        if self._watching is None and not self._is_closed:
            self._watch()

    def close(self) -> None:
        """Stop sampling; the queue has been closed with its waiting calls."""
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
            self._alike.pop(self, None)
            self._record()

    def _watch(self) -> None:
        self._alike[self] = self._report()
        self._record()
        self._watching = asyncio.get_running_loop().call_later(QUEUE_EVERY_S, self._watch)

    def _record(self) -> None:
        reports = self._alike.values()
        oldest_s = max((report.oldest_age_s for report in reports), default=0.0)
        num_waiting = sum(report.num_waiting for report in reports)
        meter.set(QUEUE_LENGTH, num_waiting, member=self._member)
        meter.set(QUEUE_AGE_MS, oldest_s * 1e3, member=self._member)


def recorded_golden_ms(member: str, check: Callable[[], None]) -> float:
    """Run a member's golden check, record whether it passed, and return its ms.

    A failure is sent to Ray before the error is raised, since it ends the replica: Ray exports what
    it has when the process ends.
    """
    started = time.perf_counter()
    try:
        check()
    except Exception:
        meter.set(GOLDEN_PASSED, 0, member=member)
        meter.count(FAILED_GOLDEN_CHECKS, member=member)
        meter.flush()
        raise
    meter.set(GOLDEN_PASSED, 1, member=member)
    taken_ms = (time.perf_counter() - started) * 1e3
    meter.set(GOLDEN_MS, taken_ms, member=member)
    return taken_ms
