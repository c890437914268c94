"""Continues callers' traces that Serve does not: in other formats, and behind Serve's own proxy.

Serve continues W3C's ``traceparent`` in the process that a client reaches. So a request needs this
where its trace may be in another format (``OTEL_PROPAGATORS``), or where Serve's proxy is in front,
which hands no trace on. Elsewhere nothing of it is called.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import DefaultGetter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from app.environment import environment_value, has_haproxy
from app.telemetry.spans import orphans

VARIABLE = "OTEL_PROPAGATORS"
BY_SERVE = frozenset({"tracecontext", "baggage", "none", ""})  # baggage is no trace


class _LowerCase(DefaultGetter):
    """Reads headers by lower-case names, whatever the propagator calls them."""

    def get(self, carrier: Mapping[str, list[str] | str], key: str) -> list[str] | None:
        return super().get(carrier, key.lower())


def continues_traces() -> bool:
    """Whether requests of this process need :func:`continued`."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        return False
    names = {name.strip() for name in (environment_value(VARIABLE) or "").split(",")}
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
