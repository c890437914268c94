"""Records spans of stages after they ran, from their measured times.

Requests that are not sampled have no parent and cost nothing here. A span that the SDK begins and
ends costs 0.1 ms; these are made when they are over.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode

from app.tracing.clock import clock
from app.tracing.parents import SAMPLED, ids

Value = str | int | float | bool  # an attribute's value
outlets: list[Callable[[ReadableSpan], None]] = []  # called with every span; set by the pipeline
SCOPE = InstrumentationScope("tandem")
UNSET = Status(StatusCode.UNSET)


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
