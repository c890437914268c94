"""Schedules batches of several queues on one set of cores, one batch per core at a time.

Members that share a process share its cores. If each had cores of its own, those of the cheaper
member would stand still until the dearer one is done; with turns every core works while an image
waits for any member.

Where the images are decoded on the same cores, a batch that could be larger waits for those that
are being decoded while that keeps every core busy: the cores do what has to be done anyway, and the
batch costs less an image.

A batch that is whole can be taken ahead, while the cores are busy: the thread whose batch ends then
begins the next one at once, and does not wait for an event loop that is decoding.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from app.queueing.hold import Hold

MAX_HOLD_S = 0.05  # that a batch waits; eight photos are decoded in half of it on one core


class Queue(Protocol):
    """What takes turns: something with batches to run."""

    @property
    def waiting_since(self) -> float | None:
        """When the image that waits longest arrived; None when none waits."""
        ...

    def take(self) -> Coroutine[Any, Any, None] | None:
        """Form the next batch and return its run, not yet started; None if nobody wants one."""
        ...

    def would_grow(self, num_more: int, within_s: float) -> bool:
        """Whether the next batch would be larger, and none late, if so many more came by then."""
        ...

    @property
    def has_whole_batch(self) -> bool:
        """Whether a batch is whole already, and would be no better for waiting longer."""
        ...


class Source(Protocol):
    """What makes the images for the queues, beside the loop, and on the same cores."""

    @property
    def num_busy(self) -> int:
        """How many cores it keeps busy with them."""
        ...

    @property
    def num_coming(self) -> int:
        """Images that it makes or is going to."""
        ...

    def tell(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` on the loop whenever an image is made, or will not be."""
        ...


def num_worth_waiting_for(source: Source, num_busy: int, num_cores: int) -> int:
    """Return how many images are coming; 0 if one of the cores is idle until they have come.

    ``num_busy`` cores do something else than make them.
    """
    return source.num_coming if num_busy + source.num_busy >= num_cores else 0


class BatchScheduler:
    """Gives each free place to the queue whose image has waited longest.

    Args:
        num_at_once: batches at a time.
        threads_each: cores that a batch keeps busy.
        num_ahead: batches that may be taken while all places are busy; who runs them lets them
            wait in the order in which they were taken.

    """

    def __init__(self, num_at_once: int = 1, threads_each: int = 1, num_ahead: int = 0) -> None:
        self._num_free, self._threads_each = num_at_once, threads_each  # less than 0: ahead
        self._num_at_once, self._num_ahead = num_at_once, num_ahead
        self._num_cores = num_at_once * threads_each
        self._queues: list[Queue] = []
        self._source: Source | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._is_called = False
        self._hold = Hold(self._give)

    def join(self, queue: Queue) -> None:
        """Let ``queue`` take turns with the others."""
        self._queues.append(queue)

    def share_cores_with(self, source: Source) -> None:
        """Let batches wait for what ``source`` makes of images, while it keeps the cores busy."""
        self._source = source
        source.tell(self.call)

    def call(self) -> None:
        """Say that images wait; turns are given when what the loop does now is done.

        So images that arrive in one turn of the loop share a batch. It is no timer.
        """
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        self._is_called = False
        while queue := self._next() if self._num_free > 0 else self._next_ahead():
            if (run := queue.take()) is None:
                continue
            self._hold.end()
            self._num_free -= 1
            task = asyncio.get_running_loop().create_task(run)
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _next(self) -> Queue | None:
        since = [(queue.waiting_since, queue) for queue in self._queues]
        waiting = [(when, queue) for when, queue in since if when is not None]
        if not waiting:
            self._hold.end()  # of images that are gone
        elif num_coming := self._num_worth_waiting_for():
            waiting = [pair for pair in waiting if not pair[1].would_grow(num_coming, MAX_HOLD_S)]
            if not waiting:
                self._hold.begin(MAX_HOLD_S)
        return min(waiting, key=lambda pair: pair[0])[1] if waiting else None

    def _next_ahead(self) -> Queue | None:
        """Return the queue of a whole batch to take while all places are busy, if one may be."""
        if self._num_free <= -self._num_ahead:
            return None
        since = [(queue.waiting_since, queue) for queue in self._queues if queue.has_whole_batch]
        waiting = [(when, queue) for when, queue in since if when is not None]
        return min(waiting, key=lambda pair: pair[0])[1] if waiting else None

    def _num_worth_waiting_for(self) -> int:
        """Return how many images are coming; 0 if a core is idle until they have come."""
        if self._source is None or self._hold.was_whole:
            return 0
        num_busy = min(len(self._running), self._num_at_once) * self._threads_each
        return num_worth_waiting_for(self._source, num_busy, self._num_cores)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._num_free += 1
        self._give()
