"""A member's batches, its queue, its golden check."""

import pytest

from app.metrics.member import MemberMetrics, Reports, recorded_golden_ms
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
from tests.support.instruments import Instruments
from tests.support.queued_images import NumberedCall


def report() -> QueueReport:
    return QueueReport(3, 0.25)


def ran(size: int, error: Exception | None = None) -> ExecutedBatch:
    return ExecutedBatch(0.0, 1.0, (NumberedCall(),) * size, error)


async def test_batches_by_size(told: Instruments) -> None:
    metrics = MemberMetrics("a", report)
    for size in (1, 4, 4):
        metrics.executed(ran(size))
    assert told.of(BATCHES) == {("a", "1"): 1, ("a", "4"): 2}
    assert told.of(MEMBER_IMAGES) == {("a",): 9}


async def test_a_failed_batch_is_no_work_done(told: Instruments) -> None:
    MemberMetrics("a", report).executed(ran(4, RuntimeError()))
    assert told.of(FAILED_BATCHES) == {("a",): 1}
    assert told.of(MEMBER_IMAGES) == {}


async def test_the_queue_is_looked_at_from_the_first_batch_on(told: Instruments) -> None:
    MemberMetrics("a", report).executed(ran(1))
    assert told.of(QUEUE_LENGTH) == {("a",): 3}
    assert told.of(QUEUE_AGE_MS) == {("a",): 250}


def test_without_metrics_no_loop_is_needed() -> None:
    MemberMetrics("a", report).executed(ran(1))


def test_a_golden_check_that_passes(told: Instruments) -> None:
    taken_ms = recorded_golden_ms("a", lambda: None)
    assert told.of(GOLDEN_PASSED) == {("a",): 1}
    assert told.of(GOLDEN_MS) == {("a",): taken_ms}
    assert taken_ms >= 0


def test_a_golden_check_that_fails_is_told_before_the_error_goes_on(told: Instruments) -> None:
    """The replica ends within a second: the meter's next regular flush would be too late."""

    def check() -> None:
        raise ValueError("another answer")

    with pytest.raises(ValueError, match="another answer"):
        recorded_golden_ms("a", check)
    at_once = {name: dict(series) for name, series in told.values.items()}
    assert at_once[GOLDEN_PASSED.name] == {("a",): 0}
    assert at_once[FAILED_GOLDEN_CHECKS.name] == {("a",): 1}
    assert told.of(FAILED_GOLDEN_CHECKS) == {("a",): 1}  # once, whenever the next flush is


async def test_the_queues_of_a_members_versions_count_together(told: Instruments) -> None:
    """A shadow's empty queue does not hide that clients wait for the other version."""
    alike: Reports = {}
    main = MemberMetrics("a", report, alike)
    shadow = MemberMetrics("a", lambda: QueueReport(1, 0.0), alike)
    for metrics in (main, shadow):
        metrics.executed(ran(1))
    assert told.of(QUEUE_LENGTH) == {("a",): 4}
    assert told.of(QUEUE_AGE_MS) == {("a",): 250}
    main.close()
    assert told.of(QUEUE_LENGTH) == {("a",): 1}
    assert told.of(QUEUE_AGE_MS) == {("a",): 0}


async def test_the_last_batch_of_a_member_that_goes_is_no_beginning(told: Instruments) -> None:
    metrics = MemberMetrics("a", report)
    metrics.close()
    metrics.executed(ran(1))
    assert told.of(MEMBER_IMAGES) == {("a",): 1}
    assert metrics._watching is None


async def test_a_member_that_goes_has_an_empty_queue(told: Instruments) -> None:
    metrics = MemberMetrics("a", report)
    metrics.executed(ran(1))
    metrics.close()
    assert told.of(QUEUE_LENGTH) == {("a",): 0}
    assert told.of(QUEUE_AGE_MS) == {("a",): 0}
    assert metrics._watching is not None
    assert metrics._watching.cancelled()
