"""Work on a thread of its own: its result or error comes back, and the thread ends."""

import asyncio
import threading

import pytest

from app.compute.own_thread import on_own_thread


async def ended(thread: threading.Thread) -> None:
    async with asyncio.timeout(30):
        while thread.is_alive():
            await asyncio.sleep(0.001)


async def test_the_result_and_the_end_of_the_thread() -> None:
    thread = await on_own_thread("load", threading.current_thread)
    assert thread is not threading.current_thread()
    assert thread.name.startswith("load")
    await ended(thread)


async def test_an_error_is_the_callers() -> None:
    threads = []

    def work() -> None:
        threads.append(threading.current_thread())
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        await on_own_thread("load", work)
    await ended(threads[0])


async def test_work_goes_on_without_its_caller() -> None:
    may_end, has_begun, has_ended = (threading.Event() for _ in range(3))

    def work() -> None:
        has_begun.set()
        may_end.wait()
        has_ended.set()

    caller = asyncio.create_task(on_own_thread("load", work))
    await asyncio.to_thread(has_begun.wait)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_end.set()
    assert await asyncio.to_thread(has_ended.wait, 30)
