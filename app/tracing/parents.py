"""The current span: that of a sampled request, or of a stage's call within it."""

import contextvars
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context, attach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

# Traces that Serve began in a replica below the Gateway for an unsampled request: Serve passes on
# that a request is sampled, but not that it is not.
orphans: set[int] = set()
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
ids = RandomIdGenerator()
Value = str | int | float | bool  # an attribute's value


class Parent(NamedTuple):
    """The span of a sampled request, or of a stage's call within it."""

    span: SpanContext
    resource: Resource  # of this process


# The last result in this context, and its span, since every stage of a request asks.
_last_parent: contextvars.ContextVar[tuple[trace.Span, Parent | None] | None] = (
    contextvars.ContextVar("tandem_parent", default=None)
)


class SpanIds(NamedTuple):
    """The ids of a sampled request's span, for another process."""

    trace: int
    span: int


# For tasks that handle one request's part of a shared call; Serve only knows the call's span.
_task_parent: contextvars.ContextVar[Parent | None] = contextvars.ContextVar(
    "tandem_task_parent", default=None
)


def current_parent() -> Parent | None:
    """Return the current span; None if the request is not traced."""
    if (of_task := _task_parent.get()) is not None:
        return of_task
    span = trace.get_current_span()
    held = _last_parent.get()
    if held is not None and held[0] is span:
        return held[1]
    parent = _parent_of(span)
    _last_parent.set((span, parent))
    return parent


def name_version(version: str) -> None:
    """Record on the request's span which version of the model set answered; requires tracing."""
    trace.get_current_span().set_attribute("tandem.model_version", version)


def _parent_of(span: trace.Span) -> Parent | None:
    if not isinstance(span, ReadableSpan) or not span.is_recording():
        return None
    context = span.get_span_context()
    return None if context.trace_id in orphans else Parent(context, place_of(span.resource))


def current_ids() -> SpanIds | None:
    """Return the current span's ids for a stage in another process; None if untraced."""
    parent = current_parent()
    return SpanIds(parent.span.trace_id, parent.span.span_id) if parent else None


def continue_below(ids: SpanIds | None) -> None:
    """Make this task's spans children of a request's span; None: the request is not traced."""
    provider = trace.get_tracer_provider()
    if ids is None or not isinstance(provider, TracerProvider):
        return
    span = SpanContext(ids.trace, ids.span, True, SAMPLED)
    _task_parent.set(Parent(span, place_of(provider.resource)))


class ProcessResource(Resource):
    """A process's resource, compared by identity: the SDK's hash makes JSON for every span."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


# By the provider's resource.
_resources: dict[int, tuple[Resource, ProcessResource]] = {}


def place_of(resource: Resource) -> ProcessResource:
    """Return the resource for spans of this process, the same object each time."""
    if id(resource) not in _resources:
        own = ProcessResource(dict(resource.attributes), resource.schema_url)
        _resources[id(resource)] = resource, own
    return _resources[id(resource)][1]


def untraced() -> contextvars.Context:
    """Return a context for a task whose calls are not traced.

    An empty context would not do: Serve starts a trace at the first call without one.
    """
    nowhere = SpanContext(ids.generate_trace_id(), ids.generate_span_id(), is_remote=False)
    context = contextvars.Context()
    context.run(attach, trace.set_span_in_context(NonRecordingSpan(nowhere), Context()))
    return context
