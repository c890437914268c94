"""Spans of what has been measured: a stage runs first and is recorded when it is over.

Nothing here costs anything for a request that is not sampled: it has no :class:`Parent`.
"""

import contextvars
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context, attach
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode

logger = logging.getLogger("ray.serve")
Value = str | int | float | bool
# Traces that Serve began in a replica below the Gateway, whose request is not sampled: Serve hands
# on that a request is, not that it is not.
orphans: set[int] = set()
STEP_NS = 100_000_000  # the system clock moved by so much against the monotonic one: it was set


@dataclass(frozen=True, slots=True)
class Parent:
    """The span of a sampled request, or of the call of a stage within it."""

    context: Context  # has the span; what is recorded goes below it
    span: SpanContext


def current_parent() -> Parent | None:
    """Return the span that this code runs in; None if the request is not traced."""
    span = trace.get_current_span()
    if not span.is_recording() or span.get_span_context().trace_id in orphans:
        return None
    return Parent(trace.set_span_in_context(span), span.get_span_context())


def untraced() -> contextvars.Context:
    """Return a context for a task whose calls are to leave no trace.

    An empty one would not do: Serve begins a trace at the first call that has none.
    """
    ids = RandomIdGenerator()
    nowhere = SpanContext(ids.generate_trace_id(), ids.generate_span_id(), is_remote=False)
    context = contextvars.Context()
    context.run(attach, trace.set_span_in_context(NonRecordingSpan(nowhere), Context()))
    return context


def record(
    name: str,
    parent: Parent,
    started: float,
    ended: float,
    attributes: Mapping[str, Value] | None = None,
    links: Iterable[SpanContext] = (),
    error: str | None = None,
) -> None:
    """Record what ran from ``started`` to ``ended``, both in seconds of ``time.monotonic``.

    ``error`` says why it failed, if it did.
    """
    offset_ns = clock.offset_ns()
    span = trace.get_tracer("tandem").start_span(
        name,
        parent.context,
        attributes=attributes,
        links=[Link(span) for span in links],
        start_time=offset_ns + int(started * 1e9),
    )
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(offset_ns + int(ended * 1e9))


def record_batch(
    provider: TracerProvider,
    started: float,
    ended: float,
    attributes: Mapping[str, Value],
    links: Iterable[SpanContext],
    error: str | None = None,
) -> SpanContext:
    """Record an executed batch: a trace of its own that links to every request in it."""
    offset_ns = clock.offset_ns()
    span = provider.get_tracer("tandem").start_span(
        "batch",
        Context(),
        attributes=attributes,
        links=[Link(span) for span in links],
        start_time=offset_ns + int(started * 1e9),
    )
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(offset_ns + int(ended * 1e9))
    return span.get_span_context()


class Clock:
    """From the monotonic clock, which durations need, to the system's, which spans carry."""

    def __init__(self) -> None:
        self.num_steps = 0  # how often the system clock was seen to have been set
        self._offset_ns = self._now_ns()

    def offset_ns(self) -> int:
        """Return what to add to nanoseconds of ``time.monotonic`` now."""
        offset_ns = self._now_ns()
        if abs(offset_ns - self._offset_ns) > STEP_NS:
            self.num_steps += 1
            if self.num_steps == 1:
                logger.warning(
                    "the system clock was set by %.1f s: spans of requests under way are off by "
                    "that; further steps are only counted",
                    (offset_ns - self._offset_ns) / 1e9,
                )
        self._offset_ns = offset_ns
        return offset_ns

    def _now_ns(self) -> int:
        return time.time_ns() - time.monotonic_ns()


clock = Clock()
