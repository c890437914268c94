"""Exports spans and metrics: the pipeline of spans, its exporter, and the thread of the meter.

Serve asks for span processors before it makes a stage, and only the stage knows the settings. So
the pipeline is made empty, and gets its sink when the stage starts. The exporter is the one that
``trace_exporter`` names, with OpenTelemetry's own variables.
"""

import logging
import socket
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import opentelemetry.sdk.environment_variables as otel_names
import psutil
import ray
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import format_trace_id
from ray import serve
from ray.serve import metrics as serve_metrics
from ray.serve.exceptions import RayServeException

from app.environment import (
    environment_value,
    otlp_endpoint,
    prepend_to_environment,
    set_environment,
)
from app.errors import ConfigError
from app.queueing.overload import CircuitBreaker
from app.setting_groups import RecordSettings
from app.telemetry import metric_table as table
from app.telemetry.metrics import Meter, meter
from app.telemetry.spans import clock, orphans, outlets

HTTP_PORT, HTTP_PATH = 4318, "/v1/traces"
CONNECT_S = 1.0
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
logger = logging.getLogger("ray.serve")
# Names that opentelemetry-exporter-jaeger-thrift 1.21 imports, and that the SDK removed in 1.40.
JAEGER_NAMES = (
    *("AGENT_HOST", "AGENT_PORT", "AGENT_SPLIT_OVERSIZED_BATCHES"),
    *("ENDPOINT", "PASSWORD", "TIMEOUT", "USER"),
)
# Health checks, which come every second: ours, KServe's and gRPC's.
HEALTH_PATHS = ("/healthz", "/readyz", "/ping", "/v2/health/live", "/v2/health/ready")
QUIET = frozenset(
    {f"{method} {path}" for method in ("GET", "HEAD") for path in HEALTH_PATHS}
    | {
        "grpc.health.v1.Health/Check",
        "inference.GRPCInferenceService/ServerLive",
        "inference.GRPCInferenceService/ServerReady",
    }
)
BATCH = 512
ENDPOINT_TRIAL_EVERY_S = 10.0  # after a failure
EVERY_MS = 1000.0
MAX_WAITING = 8192  # spans; about 10 MB
FLUSH_EVERY_S = 1.0  # Ray forgets a gauge that was not set for 20 s


class Endpoint(NamedTuple):
    """The address of a collector of traces."""

    host: str
    port: int

    def problem(self) -> str | None:
        """Return why no connection can be made; None: one can."""
        try:
            socket.create_connection((self.host, self.port), CONNECT_S).close()
        except ConnectionRefusedError:
            return f"nobody listens at {self.host}:{self.port}"
        except OSError as error:
            return f"{self.host}:{self.port}: {error.strerror or error}"
        return None


def endpoint_of(records: RecordSettings) -> Endpoint | None:
    """Return where traces are sent over TCP; None if nowhere, or if the address is none."""
    where = records.trace_endpoint
    if records.trace_exporter == "otlp":
        where = where or otlp_endpoint()
    try:
        parts = urlsplit(where or "")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    is_tcp = parts.scheme in ("http", "https") and parts.hostname
    return Endpoint(str(parts.hostname), port) if is_tcp else None


def exporter_of(records: RecordSettings) -> SpanExporter | None:
    """Return the exporter; None if nobody is to get spans, or if it cannot be made.

    A tracing error must not stop the service: it is logged as a warning. ``tandem serve`` has
    already removed unusable variables (app/launch/serve.py).
    """
    # No log line per retry: app.telemetry.export logs once that spans are lost.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    try:
        match records.trace_exporter:
            case "otlp":
                return _otlp(records.trace_endpoint)
            case "jaeger":
                with warnings.catch_warnings():  # it warns at every start that Jaeger accepts OTLP
                    warnings.simplefilter("ignore", DeprecationWarning)
                    return _jaeger(records.trace_endpoint)
            case "none":
                return None
    except Exception as error:  # OpenTelemetry's errors have no common base
        logger.warning("no traces are exported (%s): %s", records.trace_exporter, error)
        return None


def _otlp(endpoint: str | None) -> SpanExporter | None:
    protocol, where = environment_value(*PROTOCOLS), endpoint or otlp_endpoint()
    if where is None:
        return None
    if protocol is None:
        protocol = "http/protobuf" if urlsplit(where).port == HTTP_PORT else "grpc"
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        if endpoint and urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + HTTP_PATH
        return Http(endpoint)
    raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: grpc or http/protobuf")


def let_jaeger_import() -> None:
    """Restore the names in the SDK that the Thrift exporter imports, each with itself as value."""
    for name in (f"OTEL_EXPORTER_JAEGER_{word}" for word in JAEGER_NAMES):
        if not hasattr(otel_names, name):
            setattr(otel_names, name, name)


def _jaeger(endpoint: str | None) -> SpanExporter:
    let_jaeger_import()
    from opentelemetry.exporter.jaeger.thrift import JaegerExporter

    class Jaeger(JaegerExporter):
        """Jaeger's Thrift exporter: to an agent over UDP, or to a collector over HTTP."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            """Export; raise if a collector refused, which the exporter only logs."""
            result: SpanExportResult = super().export(spans)
            collector = self._collector_http_client
            if collector is not None and not 200 <= collector.http_transport.code < 300:
                return SpanExportResult.FAILURE
            return result

    where = urlsplit(endpoint) if endpoint else None
    if where is None:
        return Jaeger(udp_split_oversized_batches=True)  # type: ignore[no-any-return]
    if where.scheme in ("http", "https"):
        path = "" if where.path.strip("/") else "/api/traces?format=jaeger.thrift"
        return Jaeger(collector_endpoint=endpoint.rstrip("/") + path)  # type: ignore[no-any-return, union-attr]
    return Jaeger(where.hostname, where.port or 6831, udp_split_oversized_batches=True)  # type: ignore[no-any-return]


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

    def start(self, records: RecordSettings, *, is_ingress: bool = False) -> None:
        """Make the sink, once for all stages of a process."""
        self.is_ingress |= is_ingress
        if not self.is_asked_for or self.sink is not None:
            return
        if (exporter := exporter_of(records)) is not None:
            self.sink = Sink(records.trace_exporter, exporter, endpoint_of(records))
            # Spans from app.telemetry.spans, which current_parent has filtered.
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


class CountedExporter(SpanExporter):
    """Wraps an exporter; never raises, and warns when failures begin and end.

    Attributes:
        num_done: spans that were exported or given up.
        num_failed: those given up.
    """

    def __init__(self, name: str, exporter: SpanExporter, endpoint: Endpoint | None) -> None:
        self._name, self._exporter, self._endpoint = name, exporter, endpoint
        self.num_done = self.num_failed = 0
        self._is_shut_down = False
        self._breaker = CircuitBreaker(ENDPOINT_TRIAL_EVERY_S, ENDPOINT_TRIAL_EVERY_S)

    @property
    def is_failing(self) -> bool:
        """Whether the last export failed."""
        return self._breaker.is_open

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export, and count failed spans; an exporter that failed is left alone for a while."""
        result, endpoint, reason = SpanExportResult.FAILURE, self._endpoint, "not taken"
        if is_tried := self._breaker.allows():
            try:
                result = self._exporter.export(spans)
                if result is not SpanExportResult.SUCCESS and endpoint is not None:
                    refused = f"{endpoint.host}:{endpoint.port} refuses them"
                    reason = endpoint.problem() or refused
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        has_failed = result is not SpanExportResult.SUCCESS
        self.num_done += len(spans)
        self.num_failed += len(spans) if has_failed else 0
        if is_tried:
            self._log(failed=has_failed, reason=reason)
        return result

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()

    def _log(self, *, failed: bool, reason: str) -> None:
        if failed and self._breaker.failed():
            logger.warning(
                "%s spans are lost (%s); requests are served as before, ray_tandem_dropped_spans "
                "counts them. Set trace_endpoint, start who listens there, or set "
                "trace_exporter: none",
                self._name,
                reason,
            )
        elif not failed and self._breaker.succeeded():
            logger.warning("%s spans arrive; %d were lost", self._name, self.num_failed)


class Sink:
    """Passes spans to an exporter on a thread of the SDK; counts those that fail or do not fit."""

    def __init__(
        self,
        name: str,
        exporter: SpanExporter,
        endpoint: Endpoint | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.name = name
        self._exporter = CountedExporter(name, exporter, endpoint)
        self._max_waiting = max_waiting
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=max_waiting,
            schedule_delay_millis=EVERY_MS,
            max_export_batch_size=min(BATCH, max_waiting),
        )
        self._counting = threading.Lock()
        self._num_taken = self._num_refused = 0

    @property
    def num_dropped(self) -> int:
        return self._num_refused + self._exporter.num_failed

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span that has ended, or count it as dropped; never waits."""
        with self._counting:
            # The SDK would drop the oldest span without counting it.
            if self._num_taken - self._exporter.num_done >= self._max_waiting:
                self._num_refused += 1
                return
            self._num_taken += 1
        self._processor.on_end(span)

    def shutdown(self) -> None:
        """Send the remaining spans, unless earlier exports failed."""
        if self._exporter.is_failing:
            self._exporter.shutdown()  # ends a pending retry
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._processor.force_flush(timeout_millis)


pipeline = Pipeline()


def span_processors() -> list[SpanProcessor]:
    """Return the span processors; Serve calls this in each replica (``exporter_import_path``).

    Serve's tracer provider reads the service's name and place from the environment; the user's own
    values win.
    """
    place = {"host.name": socket.gethostname()}
    if ray.is_initialized():
        context = ray.get_runtime_context()
        try:
            replica = serve.get_replica_context().replica_id
            name = f"{replica.deployment_id.name}#{replica.unique_id}"
        except RayServeException:
            name = context.get_worker_id()
        place |= {"ray.node_id": context.get_node_id(), "service.instance.id": name}
    attributes = ",".join(f"{key}={value}" for key, value in place.items())
    set_environment({"OTEL_SERVICE_NAME": "tandem"})
    prepend_to_environment("OTEL_RESOURCE_ATTRIBUTES", attributes)
    logging.getLogger("ray.serve").addFilter(TraceIds())
    pipeline.is_asked_for = True
    return [pipeline]


def start_metrics(*, has_key_names: bool = False) -> None:
    """Start the meter if this process is a replica of Serve; its stages share it."""
    meter.has_key_names = has_key_names
    try:
        serve.get_replica_context()
    except RayServeException:
        return
    if meter.start(ray_instrument):
        Feeder(meter).start()


def ray_instrument(metric: table.Metric) -> Any:
    """Make Ray's counter or gauge; Serve's adds the tags deployment, replica and application."""
    tags: Any = metric.tags  # typed as 1-tuples
    kind = serve_metrics.Counter if metric.kind == "counter" else serve_metrics.Gauge
    return kind(metric.name, metric.text, tags)


class Feeder(threading.Thread):
    """Flushes the meter every few seconds."""

    def __init__(self, target: Meter) -> None:
        super().__init__(name="metrics", daemon=True)
        self._meter, self._process = target, psutil.Process()
        self._cpu_s = time.process_time()

    def run(self) -> None:
        """Run until the process ends or the meter stops."""
        while self._meter.is_on:
            self.flush()
            time.sleep(FLUSH_EVERY_S)

    def flush(self) -> None:
        """Send everything to Ray, and the process's own figures."""
        self._meter.flush(self._record_process)

    def _record_process(self) -> None:
        before, self._cpu_s = self._cpu_s, time.process_time()
        self._meter.count(table.PROCESS_CPU_MS, by=(self._cpu_s - before) * 1e3)
        self._meter.set(table.PROCESS_MEMORY, self._process.memory_info().rss)
        self._meter.set(table.CLOCK_STEPS, clock.num_steps)
        for sink, num_dropped in pipeline.dropped.items():
            self._meter.set(table.DROPPED_SPANS, num_dropped, sink=sink)
