"""Deadlines of many blocks of code, on one timer of the event loop.

``asyncio.timeout`` sets a timer for each block and cancels it again, and a request has two such
blocks. Nearly all of them end long before their time: so there is one timer, set for the earliest
deadline, and whoever comes before it fires only enters and leaves a set.
"""

import asyncio
import math
from types import TracebackType
from typing import Self

RESOLUTION_S = 0.001  # of the timers of uvloop, which may fire that much too early


class Deadlines:
    """The deadlines of one event loop's blocks; all methods are called on it."""

    def __init__(self) -> None:
        self._open: set[Deadline] = set()
        self._loop: asyncio.AbstractEventLoop | None = None  # of the timer
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf  # by the loop's clock

    def within(self, seconds: float) -> "Deadline":
        """Return a context manager that cancels its block after ``seconds``, and then raises.

        It does what ``asyncio.timeout`` does: the task is cancelled once, and the block ends with
        TimeoutError in place of that cancellation, but not of anybody else's.
        """
        return Deadline(self, seconds)

    def add(self, deadline: "Deadline") -> float:
        """Look after a deadline from now on; return the time by the loop's clock."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._timer, self._timer_at = loop, None, math.inf
            self._open.clear()
        now = loop.time()
        deadline.at = now + deadline.seconds
        self._open.add(deadline)
        if deadline.at < self._timer_at:
            self._set_timer(deadline.at)
        return now

    def remove(self, deadline: "Deadline") -> None:
        """Forget a deadline."""
        self._open.discard(deadline)

    def expire_now(self, deadline: "Deadline") -> None:
        """Let the block of ``deadline`` be cancelled in the loop's next turn."""
        assert self._loop is not None
        deadline.at = self._loop.time()
        self._set_timer(deadline.at)

    def _set_timer(self, at: float) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(at, self._look), at

    def _look(self) -> None:
        assert self._loop is not None
        self._timer, self._timer_at = None, math.inf
        until = self._loop.time() + RESOLUTION_S
        for deadline in [deadline for deadline in self._open if deadline.at <= until]:
            self._open.discard(deadline)
            deadline.expire()
        earliest = min((deadline.at for deadline in self._open), default=math.inf)
        if earliest < math.inf:
            self._set_timer(earliest)


class Deadline:
    """The block of :meth:`Deadlines.within`.

    Raises:
        TimeoutError: at the end of the block, if it was cancelled because its time was over.

    """

    __slots__ = ("_deadlines", "_num_cancelled", "_task", "at", "has_expired", "seconds", "started")

    def __init__(self, deadlines: Deadlines, seconds: float) -> None:
        self._deadlines, self.seconds = deadlines, seconds
        self.at = math.inf  # by the loop's clock, from the block's beginning on
        self.started = 0.0  # when the block began
        self.has_expired = False
        self._task: asyncio.Task[object] | None = None
        self._num_cancelled = 0  # how often the task had been cancelled before

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline cancels a task; there is none")
        self._task, self._num_cancelled = task, task.cancelling()
        self.started = self._deadlines.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._deadlines.remove(self)
        if not self.has_expired or self._task is None:
            return
        is_ours_alone = self._task.uncancel() <= self._num_cancelled
        if is_ours_alone and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error

    def expire_now(self) -> None:
        """Cancel the block before its time, unless that is over anyway."""
        if not self.has_expired:
            self._deadlines.expire_now(self)

    def expire(self) -> None:
        """Cancel the block's task."""
        self.has_expired = True
        if self._task is not None:
            self._task.cancel()
