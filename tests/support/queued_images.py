"""Futures for the images of a batch queue, for who awaits them: to cancel one is to go away."""

import asyncio
import math

from app.queueing.scheduler import BatchResult, Waiting


class ImageFuture(asyncio.Future[BatchResult]):
    def __init__(self) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.entry: Waiting | None = None

    def cancel(self, msg: object = None) -> bool:
        if not super().cancel(msg):
            return False
        if self.entry is not None:
            self.entry.leave()
        return True

    def end(self, entry: Waiting) -> None:
        if entry.error is not None:
            self.set_exception(entry.error)
        elif entry.result is not None:
            self.set_result(entry.result)


class NumberedCall:
    """A call whose images have futures; ``number`` tells it from others."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.futures: dict[Waiting, ImageFuture] = {}

    def image_ended(self, entry: Waiting) -> None:
        self.futures[entry].end(entry)


def submit(queue, images, timeout_s=math.inf, lane="interactive", call=0):
    numbered = NumberedCall(call)
    entries = queue.submit(images, numbered, timeout_s, lane)
    for entry in entries:
        numbered.futures[entry] = ImageFuture()
        numbered.futures[entry].entry = entry
    return [numbered.futures[entry] for entry in entries]
