"""Records spans of stages after they ran, from their measured times.

Nothing here costs anything for a request that is not sampled: it has no :class:`Parent`. A span
that is begun, held and ended by the SDK costs 0.1 ms, a tenth of what tracing may; these are over
already. What is known of one is kept as it is (:class:`RecordedSpan`); the exporter's thread makes
of it what the SDK's exporters take, :class:`ReadableSpan`.
"""

import threading
from collections.abc import Callable, Iterable, Mapping

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from app.tracing.clock import clock
from app.tracing.parents import SAMPLED, Parent, ids

Value = str | int | float | bool
outlets: list[Callable[["RecordedSpan"], None]] = []  # where spans go; the pipeline's
SCOPE = InstrumentationScope("tandem")
UNSET = Status(StatusCode.UNSET)
_making = threading.Lock()


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


def record_request(
    own: SpanContext,
    parent: SpanContext | None,
    resource: Resource,
    times: tuple[float, float],
    name: str,
    attributes: Mapping[str, Value],
) -> None:
    """Record a request's own span, ``own``: below its client's ``parent``, or the trace's root.

    ``times`` are its start and end, in seconds of ``time.monotonic``.
    """
    above = Parent(parent, resource) if parent else None
    span = RecordedSpan(name, above, resource, times, attributes, (), None, own)
    span.kind = SpanKind.SERVER
    _emit(span)


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
        "kind",
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
        self._own, self.kind = own, SpanKind.INTERNAL
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
                kind=self.kind,
                status=UNSET if error is None else Status(StatusCode.ERROR, error),
                start_time=self.start_ns,
                end_time=self.end_ns,
                instrumentation_scope=SCOPE,
            )
        return self._made
