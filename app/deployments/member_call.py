"""One call of a member of this process: its images in the batch queue, and the one answer."""

import asyncio
from collections.abc import Callable, Sequence

from app.queueing.batch_records import BatchResult

Finished = Callable[[Sequence[BatchResult] | None, BaseException | None], None]


class MemberCall:
    """Waits for all images of a call with callbacks; cheaper than a task.

    Args:
        futures: of the call's images, one or more.
        finished: called once, with the results in order, or with the error of the call: the first
            image's that failed, or CancelledError if its caller went away.

    """

    def __init__(self, futures: Sequence[asyncio.Future[BatchResult]], finished: Finished) -> None:
        self._futures, self._finished = futures, finished
        self._num_left = len(futures)
        self._is_over = False
        for future in futures:
            future.add_done_callback(self._image_done)

    def cancel(self) -> None:
        """Leave the queue: what still waits is dropped when its turn comes."""
        self._end(None, asyncio.CancelledError())

    def _image_done(self, future: asyncio.Future[BatchResult]) -> None:
        if future.cancelled() or self._is_over:
            return
        if (error := future.exception()) is not None:
            self._end(None, error)
            return
        self._num_left -= 1
        if not self._num_left:
            self._end([future.result() for future in self._futures], None)

    def _end(self, results: Sequence[BatchResult] | None, error: BaseException | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        if error is not None:
            for future in self._futures:
                future.cancel()
        self._finished(results, error)
