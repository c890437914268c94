"""Bodies that are on their way: for how long, and who gives way when there is no place left."""

import asyncio
from contextlib import ExitStack

import pytest

from app.environment import MIB
from app.errors import OverloadedError, SlowBodyError
from app.queueing import uploads as module
from app.queueing.admission import Admission
from app.queueing.concurrency_limit import ConcurrencyLimit
from app.queueing.uploads import Uploads
from tests.support.hand_clock import HandClock
from tests.support.virtual_loop import run_virtually


async def never() -> None:
    await asyncio.Future()


async def read(uploads: Uploads, begun: asyncio.Event, num_bytes: int = 0) -> None:
    async with uploads.arriving(3600, num_bytes):
        begun.set()
        await never()


async def reading(uploads: Uploads) -> asyncio.Task[None]:
    begun = asyncio.Event()
    task = asyncio.create_task(read(uploads, begun))
    await begun.wait()
    return task


async def test_a_body_that_does_not_come_is_not_waited_for():
    told = r"had not arrived after 0 s.*x-request-timeout-seconds"
    with pytest.raises(SlowBodyError, match=told):
        async with Uploads().arriving(0):
            await never()


async def test_one_that_comes_in_time():
    uploads = Uploads()
    async with uploads.arriving(3600):
        await asyncio.sleep(0)
        assert uploads.cut_slowest() is False  # it is not slow yet
    assert uploads.cut_slowest() is False


async def test_an_upload_without_a_length_counts_no_bytes():
    uploads = Uploads()
    async with uploads.arriving():
        assert uploads.num_bytes == 0


async def test_an_error_goes_through_as_it_is():
    uploads = Uploads()
    with pytest.raises(OverloadedError):
        async with uploads.arriving(3600):
            raise OverloadedError("no room for these bytes")
    assert not uploads.cut_slowest()


async def test_the_first_of_the_slow_is_cut(monkeypatch):
    monkeypatch.setattr(module, "SLOW_AFTER_S", 0.0)
    uploads = Uploads()
    first, second = await reading(uploads), await reading(uploads)
    assert uploads.cut_slowest()
    with pytest.raises(SlowBodyError, match="other requests needed its place"):
        await first
    assert not second.done()
    assert uploads.cut_slowest()
    assert not uploads.cut_slowest()
    with pytest.raises(SlowBodyError):
        await second


@pytest.mark.parametrize("slow_after_s", [0.0, 3600.0])
async def test_one_whose_time_is_over_already_gives_its_place_too(monkeypatch, slow_after_s):
    """Its timer has fired and can no longer be moved, but the form's files are still being closed.

    The error would be raised in the request that asks for a place, which is innocent.
    """
    monkeypatch.setattr(module, "SLOW_AFTER_S", slow_after_s)
    uploads, expired, closed = Uploads(), asyncio.Event(), asyncio.Event()

    async def closes_slowly() -> None:
        async with uploads.arriving(0):
            try:
                await never()
            finally:
                expired.set()
                await closed.wait()

    task = asyncio.create_task(closes_slowly())
    await expired.wait()
    assert uploads.cut_slowest()
    assert not uploads.cut_slowest()  # one place, given once
    closed.set()
    with pytest.raises(SlowBodyError, match=r"had not arrived after 0 s, the request's time limit"):
        await task


async def test_who_has_just_begun_is_not_cut():
    uploads = Uploads()
    task = await reading(uploads)
    assert not uploads.cut_slowest()
    task.cancel()


def test_a_slow_upload_does_not_keep_others_out():
    async def scenario() -> None:
        admission = Admission(1)
        slow = asyncio.create_task(_admitted(admission))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            admission.admit().__enter__()
        await asyncio.sleep(module.SLOW_AFTER_S)
        with admission.admit():
            with pytest.raises(SlowBodyError):
                await slow
            assert admission.num_under_way == 1

    run_virtually(scenario())


def test_a_long_upload_is_slow_later():
    """By the size that it announced."""

    async def scenario() -> None:
        uploads = Uploads()
        task = asyncio.create_task(read(uploads, asyncio.Event(), 8 * MIB))
        await asyncio.sleep(8 * module.SLOW_S_PER_MIB - 0.01)
        assert not uploads.cut_slowest()
        await asyncio.sleep(0.01)
        assert uploads.cut_slowest()
        with pytest.raises(SlowBodyError):
            await task

    run_virtually(scenario())


async def test_slow_uploads_have_half_of_the_places(monkeypatch):
    """HAProxy counts them too, and would let nobody through to have them cut."""
    monkeypatch.setattr(module, "SLOW_AFTER_S", 0.0)
    admission = Admission(10)
    slow = [asyncio.create_task(_admitted(admission)) for _ in range(10)]
    await asyncio.sleep(0)
    with admission.admit():
        await asyncio.wait(slow, return_when=asyncio.FIRST_EXCEPTION)
        assert [task.done() for task in slow] == [True] * 5 + [False] * 5
    for task in slow:
        task.cancel()
    told = await asyncio.gather(*slow, return_exceptions=True)
    assert sum(isinstance(error, SlowBodyError) for error in told) == 5


async def test_nobody_is_cut_for_a_request_that_is_refused(monkeypatch):
    monkeypatch.setattr(module, "SLOW_AFTER_S", 0.0)
    admission = Admission(100, HandClock(), limit=AtItsLimit(100, 2, 8, 0.05))
    slow = [asyncio.create_task(_admitted(admission)) for _ in range(60)]
    await asyncio.sleep(0)
    with ExitStack() as others:
        for _ in range(16):
            others.enter_context(admission.admit())
        num_left = admission.uploads.num
        with pytest.raises(OverloadedError, match="the limit while more come"):
            admission.admit().__enter__()
        assert admission.uploads.num == num_left
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


class AtItsLimit(ConcurrencyLimit):
    """An overload: 16 may be answered at a time."""

    is_on, value = True, 16

    def __init__(self, *settings) -> None:
        super().__init__(*settings)
        self.is_on = True

    def arrived(self, now: float, num: int = 1) -> None:
        """It goes on."""

    def admitted(self, now: float) -> None:
        """It goes on."""


async def _admitted(admission: Admission) -> None:
    with admission.admit():
        async with admission.arriving(3600):
            await never()
