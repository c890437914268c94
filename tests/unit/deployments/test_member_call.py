"""A call of a member of this process: one answer for all its images."""

import asyncio

import numpy as np
import pytest

from app.deployments.member_call import MemberCall
from app.queueing.batch_records import BatchResult, ExecutedBatch

BATCH = ExecutedBatch(0.0, 1.0, (0,))


def result(value: float) -> BatchResult:
    return BatchResult(np.array([value], np.float32), 0.5, BATCH)


class Heard:
    """What a call says when it is over."""

    def __init__(self, num_images: int) -> None:
        loop = asyncio.get_running_loop()
        self.futures = [loop.create_future() for _ in range(num_images)]
        self.ends: list = []
        self.call = MemberCall(self.futures, lambda *end: self.ends.append(end))

    async def told(self) -> list:
        await asyncio.sleep(0)  # the futures' callbacks
        await asyncio.sleep(0)
        return self.ends


async def test_results_come_in_order_once_all_are_there():
    heard = Heard(3)
    for i in (2, 0):
        heard.futures[i].set_result(result(i))
    assert await heard.told() == []
    heard.futures[1].set_result(result(1))
    ((results, error),) = await heard.told()
    assert error is None
    assert [float(r.probabilities[0]) for r in results] == [0, 1, 2]


async def test_the_first_error_ends_the_call_and_the_others_leave_the_queue():
    heard = Heard(3)
    heard.futures[0].set_result(result(0))
    heard.futures[1].set_exception(ValueError("first"))
    ((results, error),) = await heard.told()
    assert results is None
    assert str(error) == "first"
    assert heard.futures[2].cancelled()


async def test_a_call_that_is_cancelled_leaves_the_queue_and_is_told_once():
    heard = Heard(2)
    heard.call.cancel()
    heard.call.cancel()
    ((results, error),) = await heard.told()
    assert results is None
    assert isinstance(error, asyncio.CancelledError)
    assert all(future.cancelled() for future in heard.futures)


@pytest.mark.parametrize("late", ["result", "error"])
async def test_what_comes_after_the_end_is_not_told(late):
    heard = Heard(2)
    heard.futures[0].set_exception(ValueError("first"))
    if late == "result":
        heard.futures[1].set_result(result(1))
    else:
        heard.futures[1].set_exception(ValueError("second"))
    assert len(await heard.told()) == 1
