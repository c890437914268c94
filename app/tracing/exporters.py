"""Makes the exporter that ``trace_exporter`` names, with OpenTelemetry's own variables."""

import logging
import socket
import warnings
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import opentelemetry.sdk.environment_variables as otel_names
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from app.environment import environment_value, otlp_endpoint
from app.errors import ConfigError
from app.settings import Settings

HTTP_PORT, HTTP_PATH = 4318, "/v1/traces"
CONNECT_S = 1.0
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
logger = logging.getLogger("ray.serve")
# Names that opentelemetry-exporter-jaeger-thrift 1.21 imports, and that the SDK removed in 1.40.
JAEGER_NAMES = (
    "AGENT_HOST",
    "AGENT_PORT",
    "AGENT_SPLIT_OVERSIZED_BATCHES",
    "ENDPOINT",
    "PASSWORD",
    "TIMEOUT",
    "USER",
)


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


def endpoint_of(settings: Settings) -> Endpoint | None:
    """Return where traces are sent over TCP; None if nowhere, or if the address is none."""
    where = settings.trace_endpoint
    if settings.trace_exporter == "otlp":
        where = where or otlp_endpoint()
    try:
        parts = urlsplit(where or "")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    is_tcp = parts.scheme in ("http", "https") and parts.hostname
    return Endpoint(str(parts.hostname), port) if is_tcp else None


def exporter_of(settings: Settings) -> SpanExporter | None:
    """Return the exporter; None if nobody is to get spans, or if it cannot be made.

    A tracing error must not stop the service: it is logged as a warning. ``tandem serve`` has
    already removed unusable variables (app/launch/trace_variables.py).
    """
    # No log line per retry: app.tracing.sink logs once that spans are lost.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    try:
        match settings.trace_exporter:
            case "otlp":
                return _otlp(settings.trace_endpoint)
            case "jaeger":
                with warnings.catch_warnings():  # it warns at every start that Jaeger accepts OTLP
                    warnings.simplefilter("ignore", DeprecationWarning)
                    return _jaeger(settings.trace_endpoint)
            case "none":
                return None
    except Exception as error:  # OpenTelemetry's errors have no common base
        logger.warning("no traces are exported (%s): %s", settings.trace_exporter, error)
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
