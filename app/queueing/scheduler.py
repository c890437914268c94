"""Schedules batches of several queues on one set of cores, one batch per core at a time.

Members that share a process share its cores. If each had cores of its own, those of the cheaper
member would stand still until the dearer one is done; with turns every core works while an image
waits for any member.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol


class Queue(Protocol):
    """What takes turns: something with batches to run."""

    @property
    def waiting_since(self) -> float | None:
        """When the image that waits longest arrived; None when none waits."""
        ...

    def take(self) -> Coroutine[Any, Any, None] | None:
        """Form the next batch and return its run, not yet started; None if nobody wants one."""
        ...


class BatchScheduler:
    """Gives each free place to the queue whose image has waited longest."""

    def __init__(self, num_at_once: int = 1) -> None:
        self._num_free = num_at_once
        self._queues: list[Queue] = []
        self._running: set[asyncio.Task[None]] = set()
        self._is_called = False

    def join(self, queue: Queue) -> None:
        """Let ``queue`` take turns with the others."""
        self._queues.append(queue)

    def call(self) -> None:
        """Say that images wait; turns are given when what the loop does now is done.

        So images that arrive in one turn of the loop share a batch. It is no timer.
        """
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        self._is_called = False
        while self._num_free and (queue := self._next()):
            if (run := queue.take()) is None:
                continue
            self._num_free -= 1
            task = asyncio.get_running_loop().create_task(run)
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _next(self) -> Queue | None:
        since = [(queue.waiting_since, queue) for queue in self._queues]
        waiting = [(when, queue) for when, queue in since if when is not None]
        return min(waiting, key=lambda pair: pair[0])[1] if waiting else None

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._num_free += 1
        self._give()
