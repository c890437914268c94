"""Spans of a member: every batch, and in a request's trace its images' queueing and inference."""

import time
from collections.abc import Sequence

from opentelemetry.trace import SpanContext

from app.queueing.batch_records import BatchResult, ExecutedBatch
from app.tracing.spans import Parent, Value, record, record_batch


def record_run(member: str, ran: ExecutedBatch) -> SpanContext | None:
    """Record an executed batch if a request in it is traced; return the batch's span.

    The tags of its images are the requests' spans (:class:`Parent`), or None where not traced.
    """
    parents = [parent for parent in ran.tags if parent is not None]
    if not parents:
        return None
    linked = {parent.span.span_id: parent.span for parent in parents}  # each request once
    facts: dict[str, Value] = {"tandem.member": member, "tandem.batch_size": len(ran.tags)}
    error = None if ran.error is None else f"{type(ran.error).__name__}: {ran.error}"
    return record_batch(parents[0].resource, ran.started, ran.ended, facts, linked.values(), error)


def record_results(parent: Parent, member: str, results: Sequence[BatchResult]) -> None:
    """Record when each image waited and ran; its ``infer`` links to the batch that it was in."""
    for index, result in enumerate(results):
        facts: dict[str, Value] = {"tandem.member": member, "tandem.image": index}
        record("queue", parent, result.started - result.queued_s, result.started, facts)
        facts = facts | {"tandem.batch_size": result.batch_size}
        links = [result.batch_span] if result.batch_span is not None else []
        ended = result.started + result.infer_s
        record("infer", parent, result.started, ended, facts, links)


def record_failure(parent: Parent, member: str, arrived: float, error: BaseException) -> None:
    """Record that a request left the queue without an answer, and why."""
    told = f"{type(error).__name__}: {error}"
    record("queue", parent, arrived, time.monotonic(), {"tandem.member": member}, error=told)
