"""Records spans of stages after they ran, from their measured times.

Nothing here costs anything for a request that is not sampled: it has no :class:`Parent`. A span
that is begun, held and ended by the SDK costs 0.1 ms, a tenth of what tracing may; these are over
already. What is known of one is kept as it is (:class:`RecordedSpan`); the exporter's thread makes
of it what the SDK's exporters take, :class:`ReadableSpan`.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context, attach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
)

logger = logging.getLogger("ray.serve")
Value = str | int | float | bool
# Traces that Serve began in a replica below the Gateway, whose request is not sampled: Serve hands
# on that a request is, not that it is not.
orphans: set[int] = set()
outlets: list[Callable[["RecordedSpan"], None]] = []  # where spans go; the pipeline's
READINGS, AT_ONCE_NS = 5, 20_000
STEP_NS = 100_000_000  # the system clock moved by so much against the monotonic one: it was set
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
SCOPE = InstrumentationScope("tandem")
UNSET = Status(StatusCode.UNSET)
ids = RandomIdGenerator()
_making = threading.Lock()


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


def _parent_of(span: trace.Span) -> Parent | None:
    if not isinstance(span, ReadableSpan) or not span.is_recording():
        return None
    context = span.get_span_context()
    return None if context.trace_id in orphans else Parent(context, _place(span.resource))


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
    _told.set(Parent(span, _place(provider.resource)))


class _Place(Resource):
    """Compared by identity: the SDK's hash writes JSON, and an exporter asks it of every span."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


_places: dict[
    int, tuple[Resource, _Place]
] = {}  # by the provider's resource, of which there is one


def _place(resource: Resource) -> _Place:
    if id(resource) not in _places:
        place = _Place(dict(resource.attributes), resource.schema_url)
        _places[id(resource)] = resource, place
    return _places[id(resource)][1]


def untraced() -> contextvars.Context:
    """Return a context for a task whose calls are to leave no trace.

    An empty one would not do: Serve begins a trace at the first call that has none.
    """
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
    _emit(RecordedSpan(name, parent, parent.resource, (started, ended), attributes, links, error))


def record_batch(
    resource: Resource,
    started: float,
    ended: float,
    attributes: Mapping[str, Value],
    links: Iterable[SpanContext],
    error: str | None = None,
) -> SpanContext:
    """Record an executed batch: a trace of its own that links to every request in it."""
    own = SpanContext(ids.generate_trace_id(), ids.generate_span_id(), False, SAMPLED)
    _emit(RecordedSpan("batch", None, resource, (started, ended), attributes, links, error, own))
    return own


def _emit(span: "RecordedSpan") -> None:
    for outlet in outlets:
        outlet(span)


class RecordedSpan:
    """What is known of a span that has ended.

    Args:
        times: its start and end, in seconds of ``time.monotonic``.
        own: its identity; None: one is made when it is asked for.

    """

    __slots__ = (
        "_made",
        "_own",
        "attributes",
        "end_ns",
        "error",
        "links",
        "name",
        "parent",
        "resource",
        "start_ns",
    )

    def __init__(
        self,
        name: str,
        parent: Parent | None,
        resource: Resource,
        times: tuple[float, float],
        attributes: Mapping[str, Value] | None,
        links: Iterable[SpanContext],
        error: str | None,
        own: SpanContext | None = None,
    ) -> None:
        offset_ns = clock.offset_ns()
        self.name, self.parent, self.resource = name, parent, resource
        self.start_ns = offset_ns + int(times[0] * 1e9)  # since 1970
        self.end_ns = offset_ns + int(times[1] * 1e9)
        self.attributes, self.links, self.error = attributes or {}, tuple(links), error
        self._own = own
        self._made: ReadableSpan | None = None

    @property
    def own(self) -> SpanContext:
        """Its identity, the same for every sink; they have threads of their own."""
        with _making:
            if self._own is None:
                trace_id = self.parent.span.trace_id if self.parent else ids.generate_trace_id()
                self._own = SpanContext(trace_id, ids.generate_span_id(), False, SAMPLED)
            return self._own

    def made(self) -> ReadableSpan:
        """Return what the SDK's exporters take."""
        if self._made is None:
            error = self.error
            self._made = ReadableSpan(
                self.name,
                self.own,
                self.parent.span if self.parent else None,
                self.resource,
                self.attributes,
                links=[Link(link) for link in self.links],
                status=UNSET if error is None else Status(StatusCode.ERROR, error),
                start_time=self.start_ns,
                end_time=self.end_ns,
                instrumentation_scope=SCOPE,
            )
        return self._made


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
        """Compare the clocks; again if the thread was interrupted between one and the other.

        On a busy machine that is milliseconds, by which a span would lie beside its parent.
        """
        best = None
        for _ in range(READINGS):
            before, now, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
            if after - before < AT_ONCE_NS:
                return now - (before + after) // 2
            reading = after - before, now - (before + after) // 2
            best = reading if best is None else min(best, reading)
        assert best is not None
        return best[1]


clock = Clock()
