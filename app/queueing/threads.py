"""Threads that run work for an event loop and hand each outcome back to it."""

import asyncio
import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

R = TypeVar("R")
Done = Callable[[R | None, BaseException | None], None]  # the result, or the error
Work = tuple[Callable[[], R], asyncio.AbstractEventLoop, Done[R]]

END_WITHIN_S = 5.0  # at the end of the process, what a thread is at


class WorkerThreads(Generic[R]):
    """A pool of ``num`` threads, called from an event loop.

    Outcomes that become ready while the loop does something else are handed over together: waking
    the loop and giving it the interpreter costs as much as a small piece of work. The loop's own
    ``run_in_executor`` does so for each, with two futures and a lock besides.
    """

    def __init__(self, num: int, name: str) -> None:
        self._work: SimpleQueue[Work[R] | None] = SimpleQueue()
        self._outcomes: Outcomes[R] = Outcomes()
        self._threads = [
            threading.Thread(
                target=_run_all,
                args=(self._work, self._outcomes),
                name=f"{name}_{index}",
                daemon=True,  # nobody waits for work whose loop has ended, but see _end_all
            )
            for index in range(num)
        ]
        self._is_running = False

    def start(self, work: Callable[[], R], done: Done[R]) -> None:
        """Run ``work`` on a thread, then call ``done`` on the running loop."""
        if not self._is_running:
            self._begin()
        self._work.put((work, asyncio.get_running_loop(), done))

    def end(self) -> None:
        """Let the threads end when nothing is left to do, and wait for them for a moment."""
        _stop(self._work, len(self._threads))
        for thread in self._threads:
            thread.join(END_WITHIN_S)

    def _begin(self) -> None:
        self._is_running = True
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, _stop, self._work, len(self._threads)).atexit = False
        _RUNNING.add(self)


class Outcomes(Generic[R]):
    """What threads have done and the loop has not heard of yet."""

    def __init__(self) -> None:
        self._ready: deque[tuple[Done[R], R | None, BaseException | None]] = deque()
        self._told: asyncio.AbstractEventLoop | None = None  # is going to call _hand_over

    def add(
        self,
        loop: asyncio.AbstractEventLoop,
        done: Done[R],
        result: R | None,
        error: BaseException | None,
    ) -> None:
        """Keep an outcome for ``loop``; called on a thread."""
        self._ready.append((done, result, error))
        if self._told is loop:
            return
        self._told = loop
        try:
            loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:  # the loop was closed meanwhile: nobody waits any more
            self._told = None
            self._ready.clear()

    def _hand_over(self) -> None:
        self._told = None  # first: the loop is told anew of what becomes ready from now on
        while self._ready:
            done, result, error = self._ready.popleft()
            try:
                done(result, error)
            except Exception as raised:
                failed = {"message": f"{done} failed", "exception": raised}
                asyncio.get_running_loop().call_exception_handler(failed)


_RUNNING: "weakref.WeakSet[WorkerThreads[Any]]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Let no thread come back from native code into an interpreter that is gone: that aborts."""
    for threads in list(_RUNNING):
        threads.end()


def _stop(work: SimpleQueue[Work[R] | None], num: int) -> None:
    for _ in range(num):
        work.put(None)


def _run_all(work: SimpleQueue[Work[R] | None], outcomes: Outcomes[R]) -> None:
    while (given := work.get()) is not None:
        run, loop, done = given
        result, error = None, None
        try:
            result = run()
        except BaseException as raised:
            error = raised
        outcomes.add(loop, done, result, error)
        del given, run, loop, done, result, error  # not kept until the next work comes
