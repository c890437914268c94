"""Deadlines of many blocks on one timer: what ``asyncio.timeout`` does, for less."""

import asyncio
import contextlib
import math

import pytest

from app.queueing.deadlines import Deadlines


async def never() -> None:
    await asyncio.Future()


async def within(deadlines: Deadlines, seconds: float) -> None:
    with deadlines.within(seconds):
        await never()


async def test_a_block_that_takes_too_long_raises():
    with pytest.raises(TimeoutError):
        await within(Deadlines(), 0.01)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
async def test_no_time_at_all(seconds):
    with pytest.raises(TimeoutError):
        await within(Deadlines(), seconds)


async def test_a_block_that_ends_in_time_is_left_alone():
    deadlines = Deadlines()
    with deadlines.within(0.01) as deadline:
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    assert not deadline.has_expired


async def test_no_deadline():
    with Deadlines().within(math.inf):
        await asyncio.sleep(0.002)


async def test_each_has_its_own_time_whatever_their_order():
    deadlines, ended = Deadlines(), []

    async def one(seconds: float) -> None:
        with pytest.raises(TimeoutError):
            await within(deadlines, seconds)
        ended.append(seconds)

    await asyncio.gather(*map(one, (0.06, 0.02, 0.09, 0.04)))
    assert ended == [0.02, 0.04, 0.06, 0.09]


async def test_one_timer_for_all():
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    num_set = 0
    call_at = loop.call_at

    def counted(*facts):
        nonlocal num_set
        num_set += 1
        return call_at(*facts)

    loop.call_at = counted  # type: ignore[method-assign]
    for _ in range(100):
        with deadlines.within(30.0):
            pass
    assert num_set == 1


async def test_the_block_may_end_by_itself_though_its_time_is_over():
    """The cancellation was swallowed inside: as with asyncio.timeout there is no error then."""
    with Deadlines().within(0.001) as deadline, contextlib.suppress(asyncio.CancelledError):
        await never()
    assert deadline.has_expired
    assert not asyncio.current_task().cancelling()


async def test_a_cancellation_by_somebody_else_stays_one():
    task = asyncio.create_task(within(Deadlines(), 30.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_both_at_once_is_a_cancellation():
    deadlines = Deadlines()
    task = asyncio.create_task(within(deadlines, 0.0))
    await asyncio.sleep(0)
    task.cancel()  # before the timer is looked at
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_within_another():
    deadlines = Deadlines()

    async def both() -> None:
        with deadlines.within(0.02):
            with pytest.raises(TimeoutError):
                await within(deadlines, 0.005)
            await never()

    with pytest.raises(TimeoutError):
        await both()


async def test_an_error_goes_through():
    with pytest.raises(ValueError, match="mine"), Deadlines().within(0.0):
        raise ValueError("mine")


async def test_a_block_can_be_ended_before_its_time():
    deadlines = Deadlines()
    task = asyncio.create_task(within(deadlines, 30.0))
    with deadlines.within(30.0) as other:
        await asyncio.sleep(0)
        for deadline in set(deadlines._open) - {other}:
            deadline.expire_now()
        with pytest.raises(TimeoutError):
            await task
        assert not other.has_expired


def test_the_timer_of_a_loop_that_has_ended_is_not_waited_for():
    deadlines = Deadlines()

    async def one(seconds: float) -> None:
        with deadlines.within(seconds):
            await asyncio.sleep(0)

    asyncio.run(one(0.01))
    with pytest.raises(TimeoutError):
        asyncio.run(within(deadlines, 0.02))
