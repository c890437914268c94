"""Threads that run work for an event loop and hand each outcome back to it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

R = TypeVar("R")
Done = Callable[[R | None, BaseException | None], None]  # the result, or the error


class WorkerThreads(Generic[R]):
    """A pool of threads, called from an event loop.

    The loop's own ``run_in_executor`` does the same with two futures for each piece of work, which
    cost as much as the handing over itself.
    """

    def __init__(self, num: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num, name)

    def start(self, work: Callable[[], R], done: Done[R]) -> None:
        """Run ``work`` on a thread, then call ``done`` on the running loop."""
        self._threads.submit(_run, work, asyncio.get_running_loop(), done)


def _run(work: Callable[[], R], loop: asyncio.AbstractEventLoop, done: Done[R]) -> None:
    result, error = None, None
    try:
        result = work()
    except BaseException as raised:
        error = raised
    with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
        loop.call_soon_threadsafe(done, result, error)
