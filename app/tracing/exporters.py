"""Makes the exporter that ``trace_exporter`` names; OpenTelemetry's variables are honoured."""

import logging
import warnings
from collections.abc import Sequence
from urllib.parse import urlsplit

import opentelemetry.sdk.environment_variables as otel_names
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from app.environment import environment_value
from app.errors import ConfigError
from app.settings import Settings

HTTP_PORT, HTTP_PATH = 4318, "/v1/traces"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
logger = logging.getLogger("ray.serve")
# The names that opentelemetry-exporter-jaeger-thrift 1.21 imports and the SDK dropped with 1.40.
JAEGER_NAMES = (
    "AGENT_HOST",
    "AGENT_PORT",
    "AGENT_SPLIT_OVERSIZED_BATCHES",
    "ENDPOINT",
    "PASSWORD",
    "TIMEOUT",
    "USER",
)


def exporter_of(settings: Settings) -> SpanExporter | None:
    """Return the exporter; None if nothing leaves this machine, or if it cannot be made.

    Tracing is no reason not to serve: a warning says why. tandem serve has named the variables
    before (app/launch/trace_variables.py), and left them out.
    """
    # A retry is no news: app.tracing.sink says once that spans are lost.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    try:
        return _exporter_of(settings)
    except Exception as error:  # OpenTelemetry's have no root in common
        logger.warning("no traces are exported (%s): %s", settings.trace_exporter, error)
        return None


def _exporter_of(settings: Settings) -> SpanExporter | None:
    match settings.trace_exporter:
        case "otlp":
            return _otlp(settings.trace_endpoint)
        case "jaeger":
            with warnings.catch_warnings():  # it says on every start that Jaeger takes OTLP
                warnings.simplefilter("ignore", DeprecationWarning)
                return _jaeger(settings.trace_endpoint)
        case "file" | "none":
            return None


def _otlp(endpoint: str | None) -> SpanExporter:
    protocol = environment_value(*PROTOCOLS)
    where = endpoint or environment_value(*ENDPOINTS)
    if protocol is None:
        protocol = "http/protobuf" if where and urlsplit(where).port == HTTP_PORT else "grpc"
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
    """Give the SDK the names back that the Thrift exporter imports; their values are themselves."""
    for name in (f"OTEL_EXPORTER_JAEGER_{word}" for word in JAEGER_NAMES):
        if not hasattr(otel_names, name):
            setattr(otel_names, name, name)


def _jaeger(endpoint: str | None) -> SpanExporter:
    let_jaeger_import()
    from opentelemetry.exporter.jaeger.thrift import JaegerExporter

    class Jaeger(JaegerExporter):
        """Jaeger's Thrift: to an agent by UDP, or to a collector by HTTP."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            """Export, and say so when a collector refused: the exporter only logs it."""
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
