"""One call of a member of this process: its images in the batch queue, and the one answer."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from app.messages import MemberAnswer
from app.queueing.batch_queue import BatchQueue
from app.queueing.batch_records import BatchResult, Waiting

Finished = Callable[[Sequence[BatchResult] | None, BaseException | None], MemberAnswer | None]


class MemberCall(asyncio.Future[MemberAnswer]):
    """The future of a member's answer; cheaper than a task, or a future for each image.

    To cancel it is to leave the queue: what still waits is dropped when its turn comes.

    Args:
        queue: its images wait there.
        finished: called once, with the results in order, and returns the answer; or with the error
            of the call: the first image's that failed, or CancelledError if its caller went away.

    """

    __slots__ = ("_entries", "_finished", "_num_left", "_queue")

    def __init__(self, queue: BatchQueue, finished: Finished) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._queue, self._finished = queue, finished
        self._entries: list[Waiting] = []
        self._num_left = 0

    def wait_for(self, entries: list[Waiting]) -> None:
        """Wait for these, one or more, of whose ends :meth:`image_done` is told."""
        self._entries, self._num_left = entries, len(entries)

    def image_done(self, entry: Waiting) -> None:
        """Hear of one of its images that has a result or an error."""
        if self.done():
            return
        if entry.error is not None:
            self.fail(entry.error)
            return
        self._num_left -= 1
        if not self._num_left:
            results = [entry.result for entry in self._entries if entry.result is not None]
            self._entries = []  # they know this call
            answer = self._finished(results, None)
            assert answer is not None
            self.set_result(answer)

    def fail(self, error: BaseException) -> None:
        """End the call with its error."""
        self._leave(error)
        self.set_exception(error)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the future, if it is not done, and leave the queue."""
        if not super().cancel(msg):
            return False
        self._leave(asyncio.CancelledError())
        return True

    def _leave(self, error: BaseException) -> None:
        entries, self._entries = self._entries, []
        for entry in entries:
            self._queue.leave(entry)
        self._finished(None, error)
