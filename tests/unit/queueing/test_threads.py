"""Work on threads, whose outcome comes back to the event loop."""

import asyncio
import threading

import pytest

from app.queueing.threads import WorkerThreads


async def outcome_of(work) -> object:
    threads: WorkerThreads = WorkerThreads(1, "test")
    outcome = asyncio.get_running_loop().create_future()

    def done(result: object, error: BaseException | None) -> None:
        assert threading.current_thread() is threading.main_thread()
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threads.start(work, done)
    return await outcome


async def test_the_result_comes_back_to_the_loop_from_a_thread_of_that_name():
    name = await outcome_of(lambda: threading.current_thread().name)
    assert str(name).startswith("test")


async def test_an_error_comes_back_as_one():
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await outcome_of(fail)


def test_a_loop_that_was_closed_meanwhile_is_nobodys_trouble():
    threads: WorkerThreads = WorkerThreads(1, "test")
    may_end = threading.Event()
    ended = threading.Event()

    async def start() -> None:
        threads.start(may_end.wait, lambda *_: ended.set())

    asyncio.run(start())
    may_end.set()
    other = threading.Event()

    async def again() -> None:
        over = asyncio.Event()
        threads.start(other.set, lambda *_: over.set())
        await over.wait()

    asyncio.run(again())  # the thread still works
    assert other.is_set()
    assert not ended.is_set()
