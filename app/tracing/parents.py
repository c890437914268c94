"""The current span: that of a sampled request, or of a stage's call within it."""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context, attach
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

# Traces that Serve began in a replica below the Gateway for an unsampled request: Serve passes on
# that a request is sampled, but not that it is not.
orphans: set[int] = set()
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
ids = RandomIdGenerator()
T = TypeVar("T")


class SpanIds(NamedTuple):
    """The ids of a sampled request's span, for another process."""

    trace: int
    span: int


# For tasks that handle one request's part of a shared call; Serve only knows the call's span.
_task_parent: contextvars.ContextVar[SpanContext | None] = contextvars.ContextVar(
    "tandem_task_parent", default=None
)


def current_parent() -> SpanContext | None:
    """Return the current span; None if the request is not traced."""
    if (of_task := _task_parent.get()) is not None:
        return of_task
    span = trace.get_current_span()
    if not isinstance(span, ReadableSpan) or not span.is_recording():
        return None
    context = span.get_span_context()
    return None if context.trace_id in orphans else context


def name_version(version: str) -> None:
    """Record on the request's span which version of the model set answered; requires tracing."""
    trace.get_current_span().set_attribute("tandem.model_version", version)


def current_ids() -> SpanIds | None:
    """Return the current span's ids for a stage in another process; None if untraced."""
    parent = current_parent()
    return SpanIds(parent.trace_id, parent.span_id) if parent else None


def continue_below(ids: SpanIds | None) -> None:
    """Make this task's spans children of a request's span; None: the request is not traced."""
    if ids is not None:
        _task_parent.set(SpanContext(ids.trace, ids.span, True, SAMPLED))


def untraced() -> contextvars.Context:
    """Return a context for a task whose calls are not traced.

    An empty context would not do: Serve starts a trace at the first call without one.
    """
    nowhere = SpanContext(ids.generate_trace_id(), ids.generate_span_id(), is_remote=False)
    context = contextvars.Context()
    context.run(attach, trace.set_span_in_context(NonRecordingSpan(nowhere), Context()))
    return context


def untraced_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Begin work that belongs to no request: it continues if its caller ends, and has no trace."""
    return asyncio.get_running_loop().create_task(work, context=untraced())
