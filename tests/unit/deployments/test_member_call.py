"""A call of a member of this process: one answer for all its images."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext

from app.deployments.member_call import MemberCall
from app.messages import MemberAnswer
from app.queueing.batch_records import BatchResult, ExecutedBatch, Waiting
from app.scaling.usage import Usage

BATCH = ExecutedBatch(0.0, 1.0, ())
IMAGE = np.zeros((1, 1, 3), np.uint8)


def result(value: float) -> BatchResult:
    return BatchResult(np.array([value], np.float32), 0.5, BATCH)


class Heard:
    """A traced call of so many images, and what its spans record when it is over."""

    def __init__(self, num_images: int) -> None:
        self.ends: list = []
        self.usage = Usage(1, 1.0)
        self.call = MemberCall(self, self.usage, num_images, "of this set")  # type: ignore[arg-type]
        self.call.parent = INVALID_SPAN_CONTEXT
        self.entries = [Waiting(IMAGE, self.call, 0.0, 1.0) for _ in range(num_images)]
        self.call.entries = list(self.entries)

    @property
    def left(self) -> list[Waiting]:
        """Those without an outcome that are dropped in their turn."""
        return [e for e in self.entries if e.is_over and e.result is None and e.error is None]

    def answered(self, parent: SpanContext, results: Sequence[BatchResult]) -> None:
        self.ends.append((results, None))

    def failed(self, parent: SpanContext, arrived: float, error: BaseException) -> None:
        self.ends.append((None, error))


async def test_results_come_in_order_once_all_are_there():
    heard = Heard(3)
    for i in (2, 0):
        heard.entries[i].end(result(i))
    assert heard.ends == []
    assert not heard.call.done()
    heard.entries[1].end(result(1))
    ((_, error),) = heard.ends
    assert error is None
    assert (await heard.call).probabilities.tolist() == [[0], [1], [2]]


async def test_the_first_error_ends_the_call_and_the_others_leave_the_queue():
    heard = Heard(3)
    heard.entries[0].end(result(0))
    heard.entries[1].end(None, ValueError("first"))
    ((results, error),) = heard.ends
    assert results is None
    assert str(error) == "first"
    assert heard.left == [heard.entries[2]]
    with pytest.raises(ValueError, match="first"):
        await heard.call


async def test_a_call_that_is_cancelled_leaves_the_queue_and_is_told_once():
    heard = Heard(2)
    assert heard.call.cancel()
    assert not heard.call.cancel()
    ((results, error),) = heard.ends
    assert results is None
    assert isinstance(error, asyncio.CancelledError)
    assert heard.left == heard.entries
    with pytest.raises(asyncio.CancelledError):
        await heard.call


async def test_who_awaits_it_and_is_cancelled_leaves_the_queue():
    heard = Heard(2)

    async def awaits() -> MemberAnswer:
        return await heard.call

    task = asyncio.create_task(awaits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard.left == heard.entries


@pytest.mark.parametrize("late", ["result", "error"])
async def test_what_comes_after_the_end_is_not_told(late):
    heard = Heard(2)
    heard.entries[0].end(None, ValueError("first"))
    if late == "result":
        heard.entries[1].end(result(1))
    else:
        heard.entries[1].end(None, ValueError("second"))
    assert len(heard.ends) == 1
    assert isinstance(heard.call.exception(), ValueError)


async def test_an_image_is_told_of_once():
    heard = Heard(1)
    heard.entries[0].end(result(0))
    heard.entries[0].end(None, ValueError("second"))
    assert len(heard.ends) == 1
    assert heard.call.done()


@pytest.mark.parametrize("ends_well", [True, False])
async def test_its_images_are_under_way_until_it_ends(ends_well):
    heard = Heard(2)
    assert heard.usage.num_under_way == 2
    for entry in heard.entries:
        entry.end(result(1) if ends_well else None, None if ends_well else ValueError("bad"))
    assert heard.usage.num_under_way == 0
    assert heard.usage.figures()["images_done"] == (2 if ends_well else 0)
    assert isinstance(heard.call.exception(), type(None) if ends_well else ValueError)
