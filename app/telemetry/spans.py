"""Spans, recorded from measured times after a stage ran, and the current request's span.

Requests that are not sampled have no parent and cost nothing here. A span that the SDK begins and
ends costs 0.1 ms; these are made when they are over. Stages are timed by the monotonic clock, spans
have times of the system clock.

Serve continues W3C's ``traceparent`` in the process that a client reaches. :func:`continued` does
where the trace may be in another format (``OTEL_PROPAGATORS``), or where Serve's own proxy is in
front, which hands none on. Elsewhere it is not called.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from opentelemetry import trace
from opentelemetry.context import Context, attach
from opentelemetry.propagators.textmap import DefaultGetter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

from app.answers import Fault
from app.environment import environment_value, has_haproxy
from app.queueing.scheduler import BatchResult, ExecutedBatch
from models.image_header import ImageHeader

Value = str | int | float | bool  # an attribute's value
outlets: list[Callable[[ReadableSpan], None]] = []  # called with every span; set by the pipeline
SCOPE = InstrumentationScope("tandem")
UNSET = Status(StatusCode.UNSET)
logger = logging.getLogger("ray.serve")
READINGS, AT_ONCE_NS = 5, 20_000
STEP_NS = 100_000_000  # the system clock was set if it moves this much against the monotonic one
# Traces that Serve began in a replica below the Gateway for an unsampled request: Serve passes on
# that a request is sampled, but not that it is not.
orphans: set[int] = set()
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
BY_SERVE = frozenset({"tracecontext", "baggage", "none", ""})  # propagators; baggage is no trace
ids = RandomIdGenerator()
T = TypeVar("T")
# For tasks that handle one request's part of a shared call; Serve only knows the call's span.
_task_parent: contextvars.ContextVar[SpanContext | None] = contextvars.ContextVar(
    "tandem_task_parent", default=None
)


class _ProcessResource(Resource):
    """A resource compared by identity: exporters hash it per span, for which the SDK makes JSON."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@cache
def _resource_of(provider: TracerProvider) -> _ProcessResource:
    return _ProcessResource(provider.resource.attributes, provider.resource.schema_url)


def record(
    name: str,
    parent: SpanContext | None,
    started: float,
    ended: float,
    attributes: Mapping[str, Value] | None = None,
    links: Iterable[SpanContext] = (),
    error: str | None = None,
) -> SpanContext:
    """Record a span from ``started`` to ``ended``, both in seconds of ``time.monotonic``.

    Without a parent it begins a trace of its own. ``error`` says why the work failed, if it did.
    """
    trace_id = ids.generate_trace_id() if parent is None else parent.trace_id
    own = SpanContext(trace_id, ids.generate_span_id(), False, SAMPLED)
    provider = trace.get_tracer_provider()
    if not outlets or not isinstance(provider, TracerProvider):
        return own
    offset_ns = clock.offset_ns()
    span = ReadableSpan(
        name,
        own,
        parent,
        _resource_of(provider),
        attributes,
        links=[Link(link) for link in links],
        status=UNSET if error is None else Status(StatusCode.ERROR, error),
        start_time=offset_ns + int(started * 1e9),  # since 1970
        end_time=offset_ns + int(ended * 1e9),
        instrumentation_scope=SCOPE,
    )
    for outlet in outlets:
        outlet(span)
    return own


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
    if (parent := current_parent()) is None:
        return
    for index, file in enumerate(files):
        # The size in pixels is the file's, before resizing.
        facts: dict[str, Value] = {"tandem.image": index, "tandem.bytes": file.num_bytes}
        if (header := file.header) is not None:
            size = {"tandem.width": header.width, "tandem.height": header.height}
            facts |= {"tandem.format": header.format, **size}
        error = file.fault.message if file.fault else None
        record("decode", parent, file.started, file.ended, facts, error=error)


class Clock:
    """Converts times of the monotonic clock, which durations need, to the system clock's."""

    def __init__(self) -> None:
        self.num_steps = 0  # how often the system clock was set
        self._offset_ns = self._now_ns()

    def offset_ns(self) -> int:
        """Return the nanoseconds to add to ``time.monotonic`` for the system's time."""
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
        """Compare the clocks; repeat if the thread was interrupted between the two readings.

        An interruption can take milliseconds on a busy machine, and would move a span out of its
        parent.
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


class SpanIds(NamedTuple):
    """The ids of a sampled request's span, for another process."""

    trace: int
    span: int


def current_parent() -> SpanContext | None:
    """Return the current span; None if the request is not traced."""
    if (of_task := _task_parent.get()) is not None:
        return of_task
    span = trace.get_current_span()
    if not isinstance(span, ReadableSpan) or not span.is_recording():
        return None
    context = span.get_span_context()
    return None if context.trace_id in orphans else context


def name_answerers(version: str, plan: str, num_asked: int) -> None:
    """Record on the request's span who answered; requires tracing.

    That is the version of the model set, the plan, and how many members the first image asked.
    """
    facts = {"tandem.model_version": version, "tandem.plan": plan}
    trace.get_current_span().set_attributes({**facts, "tandem.members_asked": num_asked})


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


class _LowerCase(DefaultGetter):
    """Reads headers by lower-case names, whatever the propagator calls them."""

    def get(self, carrier: Mapping[str, list[str] | str], key: str) -> list[str] | None:
        return super().get(carrier, key.lower())


def continues_traces() -> bool:
    """Whether requests of this process need :func:`continued`."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        return False
    names = {name.strip() for name in (environment_value("OTEL_PROPAGATORS") or "").split(",")}
    return not has_haproxy() or not names <= BY_SERVE


@contextmanager
def continued(headers: Mapping[str, str]) -> Iterator[None]:
    """Make a span below the caller's the current one, if its headers name a trace.

    Serve has begun a span of its own before, which is then left out: the new one has its facts.
    ``headers`` have lower-case names.
    """
    from opentelemetry import propagate  # it raises at import where the variable is unusable

    context = propagate.extract(headers, Context(), getter=_LowerCase())
    parent = trace.get_current_span(context).get_span_context()
    of_serve = trace.get_current_span()
    own = of_serve.get_span_context()
    if not parent.is_valid or parent.trace_id == own.trace_id:
        yield
        return
    facts = None
    if isinstance(of_serve, ReadableSpan):
        facts = of_serve.attributes
        if of_serve.parent is None:
            orphans.add(own.trace_id)
    tracer = trace.get_tracer("tandem")
    kind = trace.SpanKind.SERVER
    with tracer.start_as_current_span("request", context, kind=kind, attributes=facts):
        yield
