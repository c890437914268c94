"""The export of spans: exporters, the pipeline, lost spans, and the trace id of log lines."""

import logging
import os
import re
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from app.settings import Settings
from app.telemetry import export
from app.telemetry.export import (
    Endpoint,
    Feeder,
    Pipeline,
    Sink,
    TraceIds,
    endpoint_of,
    exporter_of,
    pipeline,
)
from app.telemetry.metric_table import CLOCK_STEPS, DROPPED_SPANS, PROCESS_CPU_MS, PROCESS_MEMORY
from app.telemetry.metrics import meter
from app.telemetry.spans import current_parent, orphans, outlets, record
from tests.support.cases import cases
from tests.support.trace_receivers import JaegerAgent, JaegerCollector, OtlpGrpc, OtlpHttp

JAEGER = {"trace_exporter": "jaeger"}


def test_the_process_tells_its_cost_and_its_losses(told, monkeypatch):
    monkeypatch.setattr(pipeline, "sink", SimpleNamespace(name="otlp", num_dropped=7))
    feeder = Feeder(meter)
    sum(range(100_000))  # costs CPU time
    feeder.flush()
    assert told.of(PROCESS_MEMORY)[()] > 1e6
    assert told.of(PROCESS_CPU_MS)[()] > 0
    assert told.of(CLOCK_STEPS)[()] >= 0
    assert told.of(DROPPED_SPANS) == {("otlp",): 7}


def test_figures_that_cannot_be_read_are_said_once_and_a_feeder_ends_with_the_meter(
    told, monkeypatch, caplog
):
    def unknown(process: psutil.Process) -> None:
        raise NotImplementedError("no /proc here")

    monkeypatch.setattr(psutil.Process, "memory_info", unknown)
    feeder = Feeder(meter)
    for _ in range(3):
        feeder.flush()
    (warning,) = caplog.messages
    assert "no /proc here" in warning
    assert "requests are served as before" in warning
    told.values.clear()
    meter.is_on = False
    feeder.run()
    assert told.values == {}


def sent(receiver, spans, **changes: object) -> None:
    """Send spans to the receiver with an exporter that the settings ask for."""
    exporter = exporter_of(Settings.model_validate({"trace_endpoint": receiver.url} | changes))
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    exporter.shutdown()


def check(received, spans) -> None:
    """Compare what arrived with what was sent."""
    assert [r.name for r in received] == [s.name for s in spans]
    decode, infer, request = received
    assert {r.trace_id for r in received} == {f"{spans[0].context.trace_id:032x}"}
    assert decode.parent_id == infer.parent_id == request.span_id
    assert request.parent_id is None
    assert infer.attributes["tandem.member"] == "a"
    assert infer.attributes["tandem.batch_size"] == 4
    assert infer.end_us - infer.start_us == pytest.approx(17_000, abs=2)
    assert request.service == "tandem"


def test_otlp_by_grpc(spans):
    with OtlpGrpc() as receiver:
        sent(receiver, spans)
    check(receiver.spans, spans)


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_otlp_by_http(spans, monkeypatch, path):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with OtlpHttp() as receiver:
        sent(receiver, spans, trace_endpoint=receiver.url + path)
    assert receiver.paths == ["/v1/traces"]
    check(receiver.spans, spans)


def test_the_standard_variables_count(spans, monkeypatch):
    with OtlpHttp() as receiver:
        of_spans = {"PROTOCOL": "grpc", "TRACES_PROTOCOL": "http/protobuf"}
        for name, value in (of_spans | {"ENDPOINT": receiver.url}).items():
            monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
        sent(receiver, spans, trace_endpoint=None)
    check(receiver.spans, spans)


@pytest.mark.parametrize("variable", [None, "ENDPOINT", "TRACES_ENDPOINT"])
def test_the_port_4318_means_http(monkeypatch, variable):
    """Also where OpenTelemetry's own variable names it: gRPC would be spoken to an HTTP port."""
    endpoint = "http://127.0.0.1:4318"
    if variable:
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{variable}", endpoint)
    exporter = exporter_of(Settings(trace_endpoint=None if variable else endpoint))
    assert type(exporter).__module__ == "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def test_jaegers_agent_and_collector(spans):
    with JaegerAgent() as receiver:
        sent(receiver, spans, trace_exporter="jaeger")
        receiver.wait_for(lambda arrived: len(arrived) == len(spans))
        check(receiver.spans, spans)
        sent(receiver, spans * 150, trace_exporter="jaeger")
        receiver.wait_for(lambda arrived: len(arrived) == 453)
    assert len(receiver.packets) > 2  # a packet has a limit, and many spans take many
    with JaegerCollector() as collector:
        exporter = exporter_of(Settings(trace_exporter="jaeger", trace_endpoint=collector.url))
        assert exporter.export(spans) is SpanExportResult.SUCCESS
        collector.status = 503
        assert exporter.export(spans) is SpanExportResult.FAILURE
    assert collector.paths[0] == "/api/traces?format=jaeger.thrift"
    check(collector.spans, spans)


@cases(
    "name, value, told",
    ("PROTOCOL", "http/json", "'http/json': grpc or http/protobuf"),
    ("TIMEOUT", "10s", "'10s'"),
    ("COMPRESSION", "zstd", '"zstd"'),
    ("ENDPOINT", "http://collector:99999", "99999|range"),
)
def test_an_exporter_that_cannot_be_made_stops_no_start(monkeypatch, caplog, name, value, told):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    assert exporter_of(Settings()) is None
    (warning,) = caplog.messages
    assert warning.startswith("no traces are exported (otlp): ")
    assert re.search(told, warning)


@cases(
    "changes, variables, endpoint",
    ({}, {}, None),
    ({}, {"PROTOCOL": "http/protobuf"}, None),
    ({}, {"ENDPOINT": "http://c:4318/"}, Endpoint("c", 4318)),
    ({}, {"TRACES_ENDPOINT": "https://c"}, Endpoint("c", 443)),
    ({}, {"ENDPOINT": "c:4317"}, None),
    ({"trace_endpoint": "http://d:1"}, {"ENDPOINT": "http://c:2"}, Endpoint("d", 1)),
    (JAEGER, {"ENDPOINT": "http://c:2"}, None),  # an agent, over UDP
    (JAEGER | {"trace_endpoint": "http://d:14268"}, {}, Endpoint("d", 14268)),
)
def test_the_endpoint_is_of_the_settings_or_variables(monkeypatch, changes, variables, endpoint):
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    assert endpoint_of(Settings(**changes)) == endpoint


def test_an_endpoint_says_why_it_cannot_be_reached(free_port):
    port = free_port()
    assert Endpoint("127.0.0.1", port).problem() == f"nobody listens at 127.0.0.1:{port}"
    assert "nohost.invalid:1: " in str(Endpoint("nohost.invalid", 1).problem())
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        assert Endpoint(host, port).problem() is None


class Scripted(SpanExporter):
    """Waits at a gate, gives the result it is told, and keeps the spans that it takes."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.result: SpanExportResult | Exception = SpanExportResult.SUCCESS
        self.spans: list[Any] = []
        self.sizes: list[int] = []  # of all that it was given
        self.is_shut_down = False

    def export(self, spans):
        self.sizes.append(len(spans))
        self.gate.wait(10)
        if isinstance(self.result, Exception):
            raise self.result
        if self.result is SpanExportResult.SUCCESS:
            self.spans += spans
        return self.result

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.gate.set()


@pytest.fixture
def exporter(monkeypatch) -> Scripted:
    """Return the exporter of every pipeline."""
    exporter = Scripted()
    monkeypatch.setattr(export, "exporter_of", lambda settings: exporter)
    monkeypatch.setattr(export, "endpoint_of", lambda settings: None)
    return exporter


def pass_on(sink: Sink, *spans: Any) -> None:
    for span in spans:
        sink.on_end(span)
    sink.force_flush(1000)


@pytest.fixture
def asked() -> Pipeline:
    pipeline = Pipeline()
    pipeline.is_asked_for = True
    return pipeline


def test_spans_go_to_the_exporter_once_and_only_with_serves_tracing(asked, exporter, spans):
    unasked = Pipeline()
    unasked.start(Settings())
    assert unasked.sink is None
    asked.start(Settings())
    sink = asked.sink
    asked.start(Settings())  # a second stage in the process
    assert asked.sink is sink
    for span in spans:
        asked.on_end(span)
    asked.shutdown()
    assert exporter.spans == spans
    assert exporter.is_shut_down
    assert asked.dropped == {"otlp": 0}


def test_a_trace_that_begins_below_the_gateway_is_nobodys(exporter, exported, asked):
    """Serve tells a replica that a request is sampled, never that it is not."""
    asked.start(Settings())
    provider = TracerProvider()
    provider.add_span_processor(asked)
    tracer = provider.get_tracer("serve")
    with tracer.start_as_current_span("replica_handle_request resnet50 classify"):
        assert current_parent() is None
        tracer.start_span("below").end()
    assert not orphans
    asked.is_ingress = True
    with tracer.start_as_current_span("replica_handle_request Gateway __call__"):
        assert current_parent() is not None
    asked.shutdown()
    assert [s.name for s in exporter.spans] == ["replica_handle_request Gateway __call__"]


@cases(
    "path",
    *("GET /healthz", "HEAD /readyz", "GET /v2/health/ready"),
    *("grpc.health.v1.Health/Check", "inference.GRPCInferenceService/ServerLive"),
)
def test_health_checks_are_left_out(asked, exporter, request_span, exported, path):
    request_span.update_name(path)
    request_span.end()
    asked.start(Settings())
    asked.on_end(exported.get_finished_spans()[0])
    asked.shutdown()
    assert exporter.spans == []


@pytest.mark.parametrize("exporter_name", ["none", "otlp"])
def test_without_a_collector_nothing_starts(asked, spans, monkeypatch, caplog, exporter_name):
    for name in ("ENDPOINT", "TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    before = list(outlets)
    asked.start(Settings(trace_exporter=exporter_name))
    asked.on_end(spans[0])
    assert asked.force_flush()
    asked.shutdown()
    assert (asked.sink, asked.dropped, outlets, caplog.messages) == (None, {}, before, [])


def test_serve_gets_the_processor_and_the_environment_its_names(monkeypatch):
    fresh = Pipeline()
    monkeypatch.setattr(export, "pipeline", fresh)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    assert export.span_processors() == [fresh]
    assert fresh.is_asked_for
    assert os.environ["OTEL_SERVICE_NAME"] == "tandem"
    assert "deployment.environment=test" in os.environ["OTEL_RESOURCE_ATTRIBUTES"]
    assert "host.name=" in os.environ["OTEL_RESOURCE_ATTRIBUTES"]


def test_an_exporter_that_hangs_costs_no_time_and_is_counted(exporter, spans):
    exporter.gate.clear()
    sink = Sink("otlp", exporter, max_waiting=10)
    began = time.monotonic()
    for _ in range(100):
        sink.on_end(spans[0])
    assert time.monotonic() - began < 5  # the gate alone would take ten
    assert sink.num_dropped == 90
    exporter.gate.set()
    assert sink.force_flush(1000)
    sink.on_end(spans[0])  # there is room again
    sink.shutdown()
    assert len(exporter.spans) == 11


@cases("result", SpanExportResult.FAILURE, OSError(104, "Connection reset by peer"), ids=str)
def test_failures_are_counted_and_told_once(exporter, spans, result, caplog, monkeypatch):
    monkeypatch.setattr(export, "ENDPOINT_TRIAL_EVERY_S", 0.0)
    exporter.result = result
    sink = Sink("otlp", exporter)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        for _ in range(3):
            pass_on(sink, spans[0])
        assert (sink.num_dropped, len(caplog.records)) == (3, 1)
        assert "requests are served as before" in caplog.text
        exporter.result = SpanExportResult.SUCCESS
        pass_on(sink, spans[0])
        assert "otlp spans arrive; 3 were lost" in caplog.text
    sink.shutdown()
    assert len(exporter.spans) == 1


def test_nobody_at_the_endpoint_is_a_loss_with_its_reason(exporter, spans, free_port, caplog):
    exporter.result, port = SpanExportResult.FAILURE, free_port()
    sink = Sink("otlp", exporter, Endpoint("127.0.0.1", port))
    pass_on(sink, spans[0])
    assert sink.num_dropped == 1
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert f"otlp spans are lost (nobody listens at 127.0.0.1:{port})" in line.message
    assert "ray_tandem_dropped_spans counts them" in line.message
    sink.shutdown()


def test_who_failed_is_left_alone_for_a_while_and_stopping_does_not_wait_for_it(exporter, spans):
    """Nothing is encoded for an endpoint that was not there a moment ago."""
    exporter.result = SpanExportResult.FAILURE
    sink = Sink("otlp", exporter)
    for _ in range(3):
        pass_on(sink, spans[0])
        exporter.result = SpanExportResult.SUCCESS  # which is not found out yet
    assert exporter.spans == []
    exporter.gate.clear()  # a retry would wait here; shutdown ends it
    sink.on_end(spans[0])
    sink.shutdown()
    assert exporter.is_shut_down
    assert sink.num_dropped == 4


def test_all_exporters_have_a_recorded_span_with_the_same_identity(exported, request_span):
    exporters = Scripted(), Scripted()
    sinks = [Sink("kept", exporter) for exporter in exporters]
    parent = current_parent()
    assert parent
    for number in range(50):
        record("decode", parent, 1.0, 2.0, {"tandem.bytes": number})
    for sink in sinks:
        pass_on(sink, *exported.get_finished_spans())
        sink.shutdown()
    first, second = (exporter.spans for exporter in exporters)
    assert first == second
    assert [span.attributes["tandem.bytes"] for span in first] == list(range(50))
    assert len({span.context.span_id for span in first}) == 50


def test_many_spans_go_in_batches(exporter, spans, monkeypatch):
    monkeypatch.setattr(export, "EVERY_MS", 3.6e6)
    sink = Sink("otlp", exporter)
    for _ in range(1000):
        sink.on_end(spans[0])
    sink.shutdown()
    assert sum(exporter.sizes) == 1000
    assert max(exporter.sizes) <= export.BATCH


def test_a_line_of_a_traced_request_has_its_id_and_any_other_has_none(exported):
    def trace_id_of_line() -> str | None:
        line = logging.makeLogRecord({"msg": "something is wrong"})
        assert TraceIds().filter(line)
        return getattr(line, "trace_id", None)

    assert trace_id_of_line() is None
    with trace.get_tracer("serve").start_as_current_span("request") as span:
        assert trace_id_of_line() == f"{span.get_span_context().trace_id:032x}"
