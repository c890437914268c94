"""A call of a member in this process."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from app.messages import MemberAnswer
from app.queueing.batch_records import BatchResult, Waiting
from app.scaling.usage import Usage
from app.tracing.parents import current_parent
from app.tracing.stages import MemberSpans


class MemberCall(asyncio.Future[MemberAnswer]):
    """The future of a member's answer; cheaper than a task or a future for each image.

    Cancelling it takes its images out of the queue: they are dropped at their turn. ``spans``
    records its end if it is traced; ``usage`` counts its images while it is under way.
    """

    __slots__ = (
        "_fingerprint",
        "_num_images",
        "_num_left",
        "_spans",
        "_usage",
        "arrived",
        "entries",
        "parent",
    )

    def __init__(self, spans: MemberSpans, usage: Usage, num_images: int, fingerprint: str) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._spans, self._usage, self._fingerprint = spans, usage, fingerprint
        self._num_images = self._num_left = num_images
        self.entries: list[Waiting] = []  # its images in the queue
        self.parent = current_parent()  # the parent of its spans; None if it is not traced
        self.arrived = time.monotonic()
        usage.began(num_images)

    def image_ended(self, entry: Waiting) -> None:
        """Take the result or error of one of its images."""
        if self.done():
            return
        if entry.error is not None:
            self.fail(entry.error)
            return
        self._num_left -= 1
        if not self._num_left:
            results = [entry.result for entry in self.entries if entry.result is not None]
            self.entries = []  # they refer to this call: breaks the cycle
            self._usage.ended(self._num_images, done=True)
            if self.parent is not None:
                self._spans.answered(self.parent, results)
            self.set_result(self._answer_of(results))

    def fail(self, error: BaseException) -> None:
        self._leave(error)
        self.set_exception(error)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the future if it is not done, and take its images out of the queue."""
        if not super().cancel(msg):
            return False
        self._leave(asyncio.CancelledError())
        return True

    def _leave(self, error: BaseException) -> None:
        entries, self.entries = self.entries, []
        for entry in entries:
            entry.leave()
        self._usage.ended(self._num_images, done=False)
        if self.parent is not None:
            self._spans.failed(self.parent, self.arrived, error)

    def _answer_of(self, results: Sequence[BatchResult]) -> MemberAnswer:
        if len(results) == 1:  # the usual case
            row, queued_s, batch = results[0]
            infer_ms, sizes = (batch.infer_s * 1e3,), (batch.size,)
            return MemberAnswer(row[None], (queued_s * 1e3,), infer_ms, sizes, self._fingerprint)
        return MemberAnswer(
            np.stack([result.probabilities for result in results]),
            tuple([result.queued_s * 1e3 for result in results]),
            tuple([result.batch.infer_s * 1e3 for result in results]),
            tuple([result.batch.size for result in results]),
            self._fingerprint,
        )
