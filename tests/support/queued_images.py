"""Futures for the images of a batch queue, for who awaits them: to cancel one is to go away."""

import asyncio
import math
from collections.abc import Sequence

from app.queueing.batch_queue import BatchQueue
from app.queueing.batch_records import BatchResult, Waiting
from app.queueing.priority import Lane
from models.runtime import Pixels


class ImageFuture(asyncio.Future[BatchResult]):
    """The future of one image."""

    def __init__(self, queue: BatchQueue) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._queue = queue
        self.entry: Waiting | None = None

    def cancel(self, msg: object = None) -> bool:
        """Go away."""
        if not super().cancel(msg):
            return False
        if self.entry is not None:
            self._queue.leave(self.entry)
        return True

    def end(self, entry: Waiting) -> None:
        """Take the outcome."""
        if entry.error is not None:
            self.set_exception(entry.error)
        elif entry.result is not None:
            self.set_result(entry.result)


def submit(
    queue: BatchQueue,
    images: Sequence[Pixels] | Pixels,
    timeout_s: float = math.inf,
    lane: Lane = "interactive",
    call: int = 0,
) -> list[ImageFuture]:
    """Queue images and return a future for each."""
    futures: dict[Waiting, ImageFuture] = {}
    entries = queue.submit(images, lambda e: futures[e].end(e), timeout_s, lane, call)
    for entry in entries:
        futures[entry] = ImageFuture(queue)
        futures[entry].entry = entry
    return [futures[entry] for entry in entries]
