"""The span pipeline: passes ended spans to the exporter.

Serve asks for span processors before it makes a stage, and only the stage knows the settings. So
the pipeline is made empty, and gets its sink when the stage starts.
"""

import logging
import socket

import ray
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import format_trace_id

from app.environment import prepend_to_environment, set_environment
from app.settings import Settings
from app.tracing.exporters import endpoint_of, exporter_of
from app.tracing.parents import orphans
from app.tracing.sink import Sink
from app.tracing.spans import outlets

# Health checks, which come every second: ours, KServe's and gRPC's.
HEALTH_PATHS = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
QUIET = frozenset(
    {f"{method} {path}" for method in ("GET", "HEAD") for path in HEALTH_PATHS}
    | {
        "grpc.health.v1.Health/Check",
        "inference.GRPCInferenceService/ServerLive",
        "inference.GRPCInferenceService/ServerReady",
    }
)


class TraceIds(logging.Filter):
    """Adds ``trace_id`` to log records made while a traced request is served."""

    def filter(self, record: logging.LogRecord) -> bool:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            record.trace_id = format_trace_id(context.trace_id)
        return True


class Pipeline(SpanProcessor):
    """Passes every span to the sink; a process has one pipeline."""

    def __init__(self) -> None:
        self.is_asked_for = False  # by Serve, if tracing is on
        self.is_ingress = False  # whether requests begin in this process
        self.sink: Sink | None = None  # None: nobody gets spans

    def start(self, settings: Settings, *, is_ingress: bool = False) -> None:
        """Make the sink, once for all stages of a process."""
        self.is_ingress |= is_ingress
        if not self.is_asked_for or self.sink is not None:
            return
        if (exporter := exporter_of(settings)) is not None:
            self.sink = Sink(settings.trace_exporter, exporter, endpoint_of(settings))
            # Spans from app.tracing.spans, which current_parent has filtered.
            outlets.append(self.sink.on_end)

    @property
    def dropped(self) -> dict[str, int]:
        """How many spans the sink has lost so far, by its name; empty without a sink."""
        return {} if self.sink is None else {self.sink.name: self.sink.num_dropped}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Note a trace that starts although its request is not sampled."""
        if span.parent is None and not self.is_ingress:
            orphans.add(span.get_span_context().trace_id)

    def on_end(self, span: ReadableSpan) -> None:
        """Pass a span on; never waits, never raises."""
        trace_id = span.context.trace_id if span.context else 0
        if span.name in QUIET or trace_id in orphans:
            if span.parent is None:
                orphans.discard(trace_id)  # the spans below it have ended
            return
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self.sink is not None:
            self.sink.on_end(span)

    def shutdown(self) -> None:
        """Send the remaining spans, unless exporting fails."""
        if self.sink is not None:
            self.sink.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self.sink is None or self.sink.force_flush(timeout_millis)


pipeline = Pipeline()


def span_processors() -> list[SpanProcessor]:
    """Return the span processors; Serve calls this in each replica (``exporter_import_path``).

    Serve's tracer provider reads the service's name and place from the environment; the user's own
    values win.
    """
    place = {"host.name": socket.gethostname()}
    if ray.is_initialized():
        context = ray.get_runtime_context()
        place |= {"ray.node_id": context.get_node_id(), "service.instance.id": _replica_name()}
    attributes = ",".join(f"{key}={value}" for key, value in place.items())
    set_environment({"OTEL_SERVICE_NAME": "tandem"})
    prepend_to_environment("OTEL_RESOURCE_ATTRIBUTES", attributes)
    logging.getLogger("ray.serve").addFilter(TraceIds())
    pipeline.is_asked_for = True
    return [pipeline]


def _replica_name() -> str:
    from ray import serve

    try:
        replica = serve.get_replica_context().replica_id
    except ray.serve.exceptions.RayServeException:
        return ray.get_runtime_context().get_worker_id()
    return f"{replica.deployment_id.name}#{replica.unique_id}"
