"""The span of a request that passes Serve's wrapper (:mod:`app.deployments.plain_requests`).

It is what Serve begins for every other request: sampled by the same sampler, below the span that
the client names in ``traceparent``, of the kind SERVER. But it is recorded once it is over, as
those of the stages are (:mod:`app.tracing.spans`).
"""

import time
from collections.abc import Mapping
from typing import NamedTuple, Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.tracing.parents import SAMPLED, Parent, SpanBuffer, ids, place_of, run_below
from app.tracing.spans import Value, record_request

W3C = TraceContextTextMapPropagator()
NO_PARENT = Context()  # of a request whose client names no span
# As the SDK describes samplers that take every trace which begins here: they need not be asked.
SAMPLE_ALL = (
    "ParentBased{root:TraceIdRatioBased{1.0}",
    "ParentBased{root:AlwaysOnSampler",
    "AlwaysOnSampler",
)


class RequestSpan(NamedTuple):
    """The span of a sampled request, from its start until it is recorded."""

    own: Parent  # as the request's stages know it
    parent: SpanContext | None  # the client's; None: it is the trace's root
    started: float  # time.monotonic

    @property
    def context(self) -> SpanContext:
        """What identifies it."""
        return self.own.span

    def end(self, name: str, attributes: Mapping[str, Value]) -> None:
        """Record it, and what its stages have recorded meanwhile."""
        record_request(self.own, self.parent, (self.started, time.monotonic()), name, attributes)


class RequestTracer:
    """Begins the spans of requests.

    Args:
        provider: its sampler decides, its resource is the spans'.
        name: a span's, as the sampler is told it.

    """

    def __init__(self, provider: TracerProvider, name: str) -> None:
        self._sampler, self._name = provider.sampler, name
        self._samples_all = provider.sampler.get_description().startswith(SAMPLE_ALL)
        self._place = place_of(provider.resource)

    @classmethod
    def of_process(cls, name: str) -> Self | None:
        """Return one for the provider that Serve has set; None if there is none: no tracing."""
        provider = trace.get_tracer_provider()
        return cls(provider, name) if isinstance(provider, TracerProvider) else None

    def begin(self, traceparent: str | None, tracestate: str | None) -> RequestSpan | None:
        """Begin a request's span, in the task that serves it.

        Args:
            traceparent: the client's header of W3C Trace Context, if there is one.
            tracestate: the other one.

        Returns:
            The span; None if the request is not sampled.

        """
        if traceparent is None and self._samples_all:
            own = SpanContext(ids.generate_trace_id(), ids.generate_span_id(), False, SAMPLED)
            return self._begun(own, None)
        context, parent = NO_PARENT, None
        if traceparent is not None:
            carrier = {"traceparent": traceparent, "tracestate": tracestate or ""}
            context = W3C.extract(carrier, context)
            named = trace.get_current_span(context).get_span_context()
            parent = named if named.is_valid else None
        trace_id = parent.trace_id if parent else ids.generate_trace_id()
        sampling = self._sampler.should_sample(context, trace_id, self._name, SpanKind.SERVER)
        if sampling.decision is not Decision.RECORD_AND_SAMPLE:
            return None
        own = SpanContext(trace_id, ids.generate_span_id(), False, SAMPLED, sampling.trace_state)
        return self._begun(own, parent)

    def _begun(self, span: SpanContext, parent: SpanContext | None) -> RequestSpan:
        own = Parent(span, self._place, SpanBuffer())
        run_below(own)
        return RequestSpan(own, parent, time.monotonic())
