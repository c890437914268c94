"""Spans of the stages: a member's batches and its images in them, and decoded files."""

import time
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from opentelemetry.trace import SpanContext

from app.messages import Fault
from app.queueing.batch_records import BatchResult, ExecutedBatch
from app.tracing.parents import current_parent
from app.tracing.spans import Value, record
from models.image_header import ImageHeader


class MemberSpans:
    """Records the spans of a member's calls and batches; nearly free for untraced requests."""

    def __init__(self, member: str) -> None:
        self._member = member
        self._batch_spans: WeakKeyDictionary[ExecutedBatch, SpanContext] = WeakKeyDictionary()

    def executed(self, batch: ExecutedBatch) -> None:
        """Record an executed batch if a request in it is traced."""
        # The queue itself does not use the span of a call's request.
        of_calls = [getattr(call, "parent", None) for call in batch.calls]
        parents: list[SpanContext] = [parent for parent in of_calls if parent is not None]
        if not parents:
            return
        linked = {parent.span_id: parent for parent in parents}  # each request once
        facts: dict[str, Value] = {"tandem.member": self._member, "tandem.batch_size": batch.size}
        error = None if batch.error is None else f"{type(batch.error).__name__}: {batch.error}"
        self._batch_spans[batch] = record(
            "batch", None, batch.started, batch.ended, facts, linked.values(), error
        )

    def answered(self, parent: SpanContext, results: Sequence[BatchResult]) -> None:
        """Record when each image of a call waited and ran; ``infer`` spans link to their batch."""
        for index, result in enumerate(results):
            batch = result.batch
            facts: dict[str, Value] = {"tandem.member": self._member, "tandem.image": index}
            record("queue", parent, batch.started - result.queued_s, batch.started, facts)
            facts = facts | {"tandem.batch_size": batch.size}
            span = self._batch_spans.get(batch)
            links = [span] if span is not None else []
            record("infer", parent, batch.started, batch.ended, facts, links)

    def failed(self, parent: SpanContext, arrived: float, error: BaseException) -> None:
        """Record that a call left the queue without an answer, and why."""
        facts: dict[str, Value] = {"tandem.member": self._member}
        text = f"{type(error).__name__}: {error}"
        record("queue", parent, arrived, time.monotonic(), facts, error=text)


class DecodedFile(NamedTuple):
    """The result of decoding a file; times are by ``time.monotonic``."""

    num_bytes: int
    started: float
    ended: float
    header: ImageHeader | None  # None: unreadable, or not requested
    fault: Fault | None


def record_decodes(files: Sequence[DecodedFile]) -> None:
    """Record a span for every file of the current request, if it is traced."""
    if (parent := current_parent()) is not None:
        for index, file in enumerate(files):
            _record(parent, index, file)


def _record(parent: SpanContext, index: int, file: DecodedFile) -> None:
    # The size in pixels is the file's, before resizing.
    facts: dict[str, Value] = {"tandem.image": index, "tandem.bytes": file.num_bytes}
    if file.header is not None:
        facts |= {"tandem.format": file.header.format}
        facts |= {"tandem.width": file.header.width, "tandem.height": file.header.height}
    error = file.fault.message if file.fault else None
    record("decode", parent, file.started, file.ended, facts, error=error)
