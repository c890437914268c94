"""Records spans of stages after they ran, from their measured times.

Nothing here costs anything for a request that is not sampled: it has no :class:`Parent`. A span
that is begun, held and ended by the SDK costs 0.1 ms, a tenth of what tracing may; these are over
already. What is known of one is kept as it is (:class:`RecordedSpan`); the exporter's thread makes
of it what the SDK's exporters take, :class:`ReadableSpan`.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Union

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from app.tracing.clock import clock
from app.tracing.parents import SAMPLED, Parent, SpanPart, Value, ids

__all__ = ["RecordedSpan", "RecordedTrace", "Value", "record", "record_batch", "record_request"]

Recorded = Union["RecordedSpan", "RecordedTrace"]
outlets: list[Callable[[Recorded], None]] = []  # where spans go; the pipeline's
SCOPE = InstrumentationScope("tandem")
UNSET = Status(StatusCode.UNSET)
_making = threading.Lock()


def record(
    name: str,
    parent: Parent,
    started: float,
    ended: float,
    attributes: Mapping[str, Value] | None = None,
    links: Collection[SpanContext] = (),
    error: str | None = None,
) -> None:
    """Record what ran from ``started`` to ``ended``, both in seconds of ``time.monotonic``.

    ``error`` says why it failed, if it did.
    """
    buffer = parent.buffer
    if buffer is not None and not buffer.is_over:
        buffer.parts.append(SpanPart(name, started, ended, attributes, links, error))
        return
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
    own: Parent,
    parent: SpanContext | None,
    times: tuple[float, float],
    name: str,
    attributes: Mapping[str, Value],
) -> None:
    """Record a request's own span, and with it what its stages have left in ``own.buffer``.

    Args:
        own: the request's span, as its stages knew it.
        parent: its client's; None: it is the trace's root.
        times: its start and end, in seconds of ``time.monotonic``.
        name: its name.
        attributes: its attributes.

    """
    above = Parent(parent, own.resource) if parent else None
    span = RecordedSpan(name, above, own.resource, times, attributes, (), None, own.span)
    span.kind = SpanKind.SERVER
    if own.buffer is None:
        _emit(span)
        return
    own.buffer.is_over = True
    _emit(RecordedTrace(span, own.buffer.parts))


def _emit(recorded: Recorded) -> None:
    for outlet in outlets:
        outlet(recorded)


class RecordedSpan:
    """What is known of a span that has ended.

    Args:
        times: its start and end, in seconds of ``time.monotonic``.
        own: its identity; None: one is made when it is asked for.
        offset_ns: from that clock to the system's; None: as it is now.

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
        "offset_ns",
        "parent",
        "resource",
        "start_ns",
    )

    num_spans = 1

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
        offset_ns: int | None = None,
    ) -> None:
        if offset_ns is None:
            offset_ns = clock.offset_ns()
        self.offset_ns = offset_ns
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

    def spans(self) -> list["RecordedSpan"]:
        """Return itself, as :class:`RecordedTrace` returns several."""
        return [self]

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


class RecordedTrace:
    """A request's own span and those of its stages, which are right below it.

    Args:
        root: the request's own; its identity has been made.
        parts: the others, in the order in which they ended.

    """

    __slots__ = ("_ids", "_spans", "parts", "root")

    def __init__(self, root: RecordedSpan, parts: Sequence[SpanPart]) -> None:
        self.root, self.parts = root, parts
        self._ids: list[int] | None = None
        self._spans: list[RecordedSpan] | None = None

    @property
    def num_spans(self) -> int:
        """How many spans it has."""
        return len(self.parts) + 1

    @property
    def ids(self) -> list[int]:
        """The identities of the parts, the same for every sink; they have threads of their own."""
        with _making:
            if self._ids is None:
                self._ids = [ids.generate_span_id() for _ in self.parts]
            return self._ids

    def spans(self) -> list[RecordedSpan]:
        """Return each as a span by itself, the request's last."""
        if self._spans is None:
            root, trace_id = self.root, self.root.own.trace_id
            below = Parent(root.own, root.resource)
            self._spans = [
                RecordedSpan(
                    part.name,
                    below,
                    root.resource,
                    (part.started, part.ended),
                    part.attributes,
                    part.links,
                    part.error,
                    SpanContext(trace_id, own, False, SAMPLED),
                    root.offset_ns,
                )
                for part, own in zip(self.parts, self.ids, strict=True)
            ] + [root]
        return self._spans
