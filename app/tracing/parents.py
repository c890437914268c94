"""The span that code runs in: of a sampled request, or of a call of a stage within it."""

import contextvars
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context, attach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

# Traces that Serve began in a replica below the Gateway, whose request is not sampled: Serve hands
# on that a request is, not that it is not.
orphans: set[int] = set()
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
ids = RandomIdGenerator()
Value = str | int | float | bool  # of an attribute


class Parent(NamedTuple):
    """The span of a sampled request, or of the call of a stage within it."""

    span: SpanContext
    resource: Resource  # of this process


# What was found last in this context, and of which span: every stage of a request asks.
_found: contextvars.ContextVar[tuple[trace.Span, Parent | None] | None] = contextvars.ContextVar(
    "tandem_parent", default=None
)


class SpanIds(NamedTuple):
    """A span of a sampled request as it is named to another process."""

    trace: int
    span: int


# Of a task that does a part of a call of many requests; Serve knows the call's span alone.
_told: contextvars.ContextVar[Parent | None] = contextvars.ContextVar("tandem_told", default=None)


def current_parent() -> Parent | None:
    """Return the span that this code runs in; None if the request is not traced."""
    if (told := _told.get()) is not None:
        return told
    span = trace.get_current_span()
    found = _found.get()
    if found is not None and found[0] is span:
        return found[1]
    parent = _parent_of(span)
    _found.set((span, parent))
    return parent


def name_version(version: str) -> None:
    """Note which version of the model set answered on the request's span, which is traced."""
    trace.get_current_span().set_attribute("tandem.model_version", version)


def _parent_of(span: trace.Span) -> Parent | None:
    if not isinstance(span, ReadableSpan) or not span.is_recording():
        return None
    context = span.get_span_context()
    return None if context.trace_id in orphans else Parent(context, place_of(span.resource))


def current_ids() -> SpanIds | None:
    """Return what names the current span to a stage in another process; None if untraced."""
    parent = current_parent()
    return SpanIds(parent.span.trace_id, parent.span.span_id) if parent else None


def continue_below(ids: SpanIds | None) -> None:
    """Let what this task does from now on be below a request's span; None: it is not traced."""
    provider = trace.get_tracer_provider()
    if ids is None or not isinstance(provider, TracerProvider):
        return
    span = SpanContext(ids.trace, ids.span, True, SAMPLED)
    _told.set(Parent(span, place_of(provider.resource)))


class ProcessResource(Resource):
    """A process's resource, compared by identity: the SDK's hash writes JSON for every span."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


# By the provider's resource, of which there is one.
_resources: dict[int, tuple[Resource, ProcessResource]] = {}


def place_of(resource: Resource) -> ProcessResource:
    """Return what spans of this process are given as their resource, the same object each time."""
    if id(resource) not in _resources:
        own = ProcessResource(dict(resource.attributes), resource.schema_url)
        _resources[id(resource)] = resource, own
    return _resources[id(resource)][1]


def untraced() -> contextvars.Context:
    """Return a context for a task whose calls are to leave no trace.

    An empty one would not do: Serve begins a trace at the first call that has none.
    """
    nowhere = SpanContext(ids.generate_trace_id(), ids.generate_span_id(), is_remote=False)
    context = contextvars.Context()
    context.run(attach, trace.set_span_in_context(NonRecordingSpan(nowhere), Context()))
    return context
