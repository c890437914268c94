"""Spans of a member: every batch, and in a request's trace its images' queueing and inference."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from opentelemetry.trace import SpanContext

from app.queueing.batch_records import BatchResult, ExecutedBatch
from app.tracing.parents import Parent, current_parent
from app.tracing.spans import Value, record, record_batch

MAX_LEFT = (
    512  # calls that ended early and are remembered: their images may be in a batch that runs
)


class MemberSpans:
    """Records the spans of one member's calls and batches; costs next to nothing untraced.

    A call has a number, by which the batch queue names its images. The span of the request that it
    belongs to is kept here meanwhile, so that the queue need not know of spans.
    """

    def __init__(self, member: str) -> None:
        self._member = member
        self._parents: dict[int, Parent] = {}  # of traced calls under way, by number
        self._left: OrderedDict[int, Parent] = OrderedDict()  # of the last that ended early
        self._batch_spans: WeakKeyDictionary[ExecutedBatch, SpanContext] = WeakKeyDictionary()

    def begin(self, call: int) -> None:
        """Note the request that a call belongs to."""
        if (parent := current_parent()) is not None:
            self._parents[call] = parent

    def executed(self, batch: ExecutedBatch) -> None:
        """Record an executed batch if a request in it is traced."""
        found = (self._parents.get(call) or self._left.get(call) for call in batch.calls)
        parents = [parent for parent in found if parent is not None]
        if not parents:
            return
        linked = {parent.span.span_id: parent.span for parent in parents}  # each request once
        facts: dict[str, Value] = {"tandem.member": self._member, "tandem.batch_size": batch.size}
        error = None if batch.error is None else f"{type(batch.error).__name__}: {batch.error}"
        self._batch_spans[batch] = record_batch(
            parents[0].resource, batch.started, batch.ended, facts, linked.values(), error
        )

    def answered(self, call: int, results: Sequence[BatchResult]) -> None:
        """Record when each image of a call waited and ran; ``infer`` links to its batch."""
        if (parent := self._parents.pop(call, None)) is None:
            return
        for index, result in enumerate(results):
            batch = result.batch
            facts: dict[str, Value] = {"tandem.member": self._member, "tandem.image": index}
            record("queue", parent, batch.started - result.queued_s, batch.started, facts)
            facts = facts | {"tandem.batch_size": batch.size}
            span = self._batch_spans.get(batch)
            links = [span] if span is not None else []
            record("infer", parent, batch.started, batch.ended, facts, links)

    def failed(self, call: int, arrived: float, error: BaseException) -> None:
        """Record that a call left the queue without an answer, and why."""
        if (parent := self._parents.pop(call, None)) is None:
            return
        self._left[call] = parent
        if len(self._left) > MAX_LEFT:
            self._left.popitem(last=False)
        facts: dict[str, Value] = {"tandem.member": self._member}
        text = f"{type(error).__name__}: {error}"
        record("queue", parent, arrived, time.monotonic(), facts, error=text)
