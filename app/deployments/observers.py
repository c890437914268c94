"""What traces and metrics hear of a stage's work, so that the stage itself need not know of them.

A stage calls its observer at each step; the observer records spans (:mod:`app.tracing`) and counts
(:mod:`app.metrics`). All methods are called on the replica's event loop and never raise.
"""

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from app.metrics.member import MemberMetrics
from app.queueing.batch_records import BatchResult, ExecutedBatch, QueueReport
from app.tracing.batches import MemberSpans
from app.tracing.decodes import DecodedFile, record_decode
from app.tracing.parents import Parent, current_parent


class DecodeCall(NamedTuple):
    """One call of the Decoder."""

    parent: Parent | None  # of its images' spans; None if the request is not traced


class DecoderObserver:
    """Observes the Decoder."""

    def begin(self) -> DecodeCall:
        """Note the request that a call belongs to."""
        return DecodeCall(current_parent())

    def decoded(self, call: DecodeCall, files: Sequence[DecodedFile]) -> None:
        """Record what became of every file."""
        if call.parent is not None:
            for index, file in enumerate(files):
                record_decode(call.parent, index, file)


class MemberCall(NamedTuple):
    """One call of a member."""

    number: int  # by which the batch queue names its images
    arrived: float  # time.monotonic


class MemberObserver:
    """Observes one member: its calls, and the batches that their images are run in.

    Args:
        member: its name.
        report: gives the state of its queue.

    """

    def __init__(self, member: str, report: Callable[[], QueueReport]) -> None:
        self._spans = MemberSpans(member)
        self._metrics = MemberMetrics(member, report)
        self._numbers = count()

    def begin(self) -> MemberCall:
        """Note a call that arrives, and the request that it belongs to."""
        call = MemberCall(next(self._numbers), time.monotonic())
        self._spans.begin(call.number)
        return call

    def executed(self, batch: ExecutedBatch) -> None:
        """Record an executed batch."""
        self._metrics.executed(batch)
        self._spans.executed(batch)

    def answered(self, call: MemberCall, results: Sequence[BatchResult]) -> None:
        """Record a call whose images were all answered."""
        self._spans.answered(call.number, results)

    def failed(self, call: MemberCall, error: BaseException) -> None:
        """Record a call that ends without an answer."""
        self._spans.failed(call.number, call.arrived, error)
