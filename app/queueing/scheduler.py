"""Schedules batches of several queues on one set of cores, one batch per core at a time.

Members that share a process share its cores. If each had cores of its own, those of the cheaper
member would stand still until the dearer one is done; with turns every core works while an image
waits for any member.

Where images are decoded on the same cores, a batch that could be larger waits for those that are
being decoded while that keeps every core busy: the larger batch costs less an image.

A whole batch of the image that is next can be taken ahead, while the cores are busy: the thread
whose batch ends begins it at once, and does not wait for an event loop that is decoding.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from app.queueing.priority import LANES, Lane, LaneTurns

MAX_HOLD_S = 0.05  # that a batch waits; eight photos are decoded in half of it on one core


class Queue(Protocol):
    """What takes turns: something with batches to run."""

    def waiting_since(self, lane: Lane) -> float | None:
        """When the image that waits longest in a lane arrived; None when none waits there."""

    def take(self) -> Coroutine[Any, Any, None] | None:
        """Form the next batch and return its run, not yet started; None if nobody wants one."""

    def would_grow(self, num_more: int, within_s: float) -> bool:
        """Whether the next batch would be larger, and none late, if so many more came by then."""

    @property
    def has_whole_batch(self) -> bool:
        """Whether interactive images fill a batch, which would be no better for waiting longer."""


class ImageSource(Protocol):
    """What decodes images for the queues on the same cores."""

    @property
    def num_busy(self) -> int:
        """How many cores it keeps busy with them."""

    @property
    def num_coming(self) -> int:
        """Images that it decodes or is going to."""

    def on_decoded(self, call: Callable[[], None]) -> None:
        """Have ``call`` called on the loop whenever an image is decoded, or will not be."""


class BatchScheduler:
    """Gives each free place to the queue whose image is next: by lane, then by age.

    Interactive images go first in all queues together; of ``BULK_EVERY`` turns one is for bulk
    images, if any wait. So a form for one member does not keep a photo for another waiting.

    Args:
        num_at_once: batches at a time.
        threads_each: cores that a batch keeps busy.
        num_ahead: batches that may be taken while all places are busy; who runs them lets them
            wait in the order in which they were taken.

    """

    def __init__(self, num_at_once: int = 1, threads_each: int = 1, num_ahead: int = 0) -> None:
        self._num_ahead = num_ahead
        self._num_at_once, self._threads_each = num_at_once, threads_each
        self._queues: list[Queue] = []
        self._turns = LaneTurns()
        self._source: ImageSource | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._is_called = False
        # A batch that would grow waits until then; afterwards none does until one has been taken.
        self._hold: asyncio.TimerHandle | None = None
        self._is_hold_over = False

    def join(self, queue: Queue) -> None:
        """Let ``queue`` take turns with the others."""
        self._queues.append(queue)

    def share_cores_with(self, source: ImageSource) -> None:
        """Let batches wait for what ``source`` decodes, while it keeps the cores busy."""
        self._source = source
        source.on_decoded(self.call)

    def call(self) -> None:
        """Say that images wait; turns are given when what the loop does now is done.

        So images that arrive in one turn of the loop share a batch. It is no timer.
        """
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._give_turns)

    def _give_turns(self) -> None:
        self._is_called = False
        while turn := self._next():
            lane, queue = turn
            if (run := queue.take()) is None:
                continue
            self._turns.taken(lane)
            self._end_hold()
            task = asyncio.get_running_loop().create_task(run)
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _next(self) -> tuple[Lane, Queue] | None:
        """Return whose batch may be taken now; None if no place is free for one."""
        num_over = len(self._running) - self._num_at_once
        if num_over < 0:
            return self._first(self._ready())
        if num_over >= self._num_ahead:
            return None
        # Only the first may go ahead, or one member's load would keep all others waiting.
        turn = self._first(self._queues)
        return turn if turn and turn[1].has_whole_batch else None

    def _first(self, queues: Sequence[Queue]) -> tuple[Lane, Queue] | None:
        """Return the queue of these whose image is next, and its lane."""
        heads = {lane: _heads(queues, lane) for lane in LANES}
        if not any(heads.values()):
            return None
        lane = self._turns.next(interactive=bool(heads["interactive"]), bulk=bool(heads["bulk"]))
        return lane, min(heads[lane], key=lambda head: head[0])[1]

    def _ready(self) -> list[Queue]:
        """Return the queues with images whose batch would not be larger for waiting a little."""
        waiting = [queue for queue in self._queues if any(_heads([queue], lane) for lane in LANES)]
        if not waiting:
            self._end_hold()  # of images that are gone
        if not waiting or not (num_coming := self._num_worth_waiting_for()):
            return waiting
        ready = [queue for queue in waiting if not queue.would_grow(num_coming, MAX_HOLD_S)]
        if not ready and self._hold is None:
            self._hold = asyncio.get_running_loop().call_later(MAX_HOLD_S, self._hold_over)
        return ready

    def _end_hold(self) -> None:
        self._is_hold_over = False
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None

    def _hold_over(self) -> None:
        self._hold, self._is_hold_over = None, True
        self._give_turns()

    def _num_worth_waiting_for(self) -> int:
        """Return how many images are coming; 0 if a core is idle until they have come."""
        if self._source is None or self._is_hold_over:
            return 0
        num_running = min(len(self._running), self._num_at_once)
        num_busy = num_running * self._threads_each + self._source.num_busy
        num_cores = self._num_at_once * self._threads_each
        return self._source.num_coming if num_busy >= num_cores else 0

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._give_turns()


def _heads(queues: Iterable[Queue], lane: Lane) -> list[tuple[float, Queue]]:
    """Return the queues with images in ``lane``, each with the arrival of its oldest one."""
    since = ((queue.waiting_since(lane), queue) for queue in queues)
    return [(arrived, queue) for arrived, queue in since if arrived is not None]
