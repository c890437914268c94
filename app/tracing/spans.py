"""Records spans of stages after they ran, from their measured times.

Requests that are not sampled have no :class:`Parent` and cost nothing here. A span that the SDK
begins and ends costs 0.1 ms; these are made when they are over.
"""

from collections.abc import Callable, Iterable, Mapping

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode

from app.tracing.clock import clock
from app.tracing.parents import SAMPLED, Parent, Value, ids

__all__ = ["Value", "record", "record_batch"]

outlets: list[Callable[[ReadableSpan], None]] = []  # called with every span; set by the pipeline
SCOPE = InstrumentationScope("tandem")
UNSET = Status(StatusCode.UNSET)


def record(
    name: str,
    parent: Parent,
    started: float,
    ended: float,
    attributes: Mapping[str, Value] | None = None,
    links: Iterable[SpanContext] = (),
    error: str | None = None,
) -> None:
    """Record a span from ``started`` to ``ended``, both in seconds of ``time.monotonic``.

    ``error`` says why the work failed, if it did.
    """
    own = SpanContext(parent.span.trace_id, ids.generate_span_id(), False, SAMPLED)
    _emit(name, own, parent.span, parent.resource, (started, ended), attributes, links, error)


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
    _emit("batch", own, None, resource, (started, ended), attributes, links, error)
    return own


def _emit(
    name: str,
    own: SpanContext,
    parent: SpanContext | None,
    resource: Resource,
    times: tuple[float, float],
    attributes: Mapping[str, Value] | None,
    links: Iterable[SpanContext],
    error: str | None,
) -> None:
    if not outlets:
        return
    offset_ns = clock.offset_ns()
    span = ReadableSpan(
        name,
        own,
        parent,
        resource,
        attributes,
        links=[Link(link) for link in links],
        status=UNSET if error is None else Status(StatusCode.ERROR, error),
        start_time=offset_ns + int(times[0] * 1e9),  # since 1970
        end_time=offset_ns + int(times[1] * 1e9),
        instrumentation_scope=SCOPE,
    )
    for outlet in outlets:
        outlet(span)
