"""Work on threads, whose outcome comes back to the event loop."""

import asyncio
import gc
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


async def test_an_outcome_that_cannot_be_taken_keeps_no_other_back():
    threads: WorkerThreads = WorkerThreads(1, "test")
    loop, told, over = asyncio.get_running_loop(), [], asyncio.Event()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    ready = threading.Event()

    def refuse(*_: object) -> None:
        raise ValueError("not taken")

    threads.start(lambda: None, refuse)
    threads.start(ready.set, lambda *_: over.set())
    assert ready.wait(30)  # the loop is held meanwhile: both outcomes are handed over together
    async with asyncio.timeout(30):
        await over.wait()
    assert [str(error) for error in told] == ["not taken"]


async def test_threads_end_with_the_pool():
    threads: WorkerThreads = WorkerThreads(2, "short")
    over = asyncio.Event()
    threads.start(lambda: None, lambda *_: over.set())
    await over.wait()
    running = [thread for thread in threading.enumerate() if thread.name.startswith("short")]
    assert len(running) == 2
    del threads
    gc.collect()
    for thread in running:
        thread.join(30)
    assert not any(thread.is_alive() for thread in running)
