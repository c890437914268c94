"""The exporter of the settings, against real receivers."""

import re
import socket

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from app.settings import Settings
from app.tracing.exporters import Endpoint, endpoint_of, exporter_of
from tests.support.trace_receivers import JaegerAgent, JaegerCollector, OtlpGrpc, OtlpHttp


def settings(**changes: object) -> Settings:
    return Settings.model_validate(changes)


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
        exporter = exporter_of(settings(trace_endpoint=receiver.url))
        assert exporter.export(spans) is SpanExportResult.SUCCESS
        exporter.shutdown()
    check(receiver.spans, spans)


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_otlp_by_http(spans, monkeypatch, path):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with OtlpHttp() as receiver:
        exporter = exporter_of(settings(trace_endpoint=receiver.url + path))
        assert exporter.export(spans) is SpanExportResult.SUCCESS
        exporter.shutdown()
    assert receiver.paths == ["/v1/traces"]
    check(receiver.spans, spans)


@pytest.mark.parametrize("variable", [None, "ENDPOINT", "TRACES_ENDPOINT"])
def test_the_port_4318_means_http(spans, monkeypatch, variable):
    """Also where OpenTelemetry's own variable names it: gRPC would be spoken to an HTTP port."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    endpoint = "http://127.0.0.1:4318"
    if variable:
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{variable}", endpoint)
    exporter = exporter_of(settings(trace_endpoint=None if variable else endpoint))
    assert isinstance(exporter, OTLPSpanExporter)


def test_the_standard_variables_count(spans, monkeypatch):
    with OtlpHttp() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        exporter = exporter_of(settings())
        assert exporter.export(spans) is SpanExportResult.SUCCESS
    check(receiver.spans, spans)


def test_jaegers_agent(spans):
    with JaegerAgent() as receiver:
        exporter = exporter_of(settings(trace_exporter="jaeger", trace_endpoint=receiver.url))
        assert exporter.export(spans) is SpanExportResult.SUCCESS
        receiver.wait_for(lambda found: len(found) == len(spans))
    check(receiver.spans, spans)


def test_a_packet_has_a_limit_and_many_spans_take_many(spans):
    with JaegerAgent() as receiver:
        exporter = exporter_of(settings(trace_exporter="jaeger", trace_endpoint=receiver.url))
        exporter.export(spans * 150)
        receiver.wait_for(lambda found: len(found) == 450)
    assert len(receiver.packets) > 1


def test_jaegers_collector(spans):
    with JaegerCollector() as receiver:
        exporter = exporter_of(settings(trace_exporter="jaeger", trace_endpoint=receiver.url))
        assert exporter.export(spans) is SpanExportResult.SUCCESS
        receiver.status = 503
        assert exporter.export(spans) is SpanExportResult.FAILURE
    assert receiver.paths[0] == "/api/traces?format=jaeger.thrift"
    check(receiver.spans, spans)


@pytest.mark.parametrize("changes", [{"trace_exporter": "none"}, {}])
def test_nothing_is_sent_without_an_exporter_or_an_address(changes, caplog):
    assert exporter_of(settings(**changes)) is None
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("PROTOCOL", "http/json", "'http/json': grpc or http/protobuf"),
        ("TIMEOUT", "10s", "'10s'"),
        ("COMPRESSION", "zstd", '"zstd"'),
        ("ENDPOINT", "http://collector:99999", "99999|range"),
    ],
)
def test_an_exporter_that_cannot_be_made_stops_no_start(monkeypatch, caplog, name, value, told):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    assert exporter_of(settings()) is None
    (warning,) = caplog.messages
    assert warning.startswith("no traces are exported (otlp): ")
    assert re.search(told, warning)


@pytest.mark.parametrize(
    ("changes", "variables", "endpoint"),
    [
        ({}, {}, None),
        ({}, {"PROTOCOL": "http/protobuf"}, None),
        ({}, {"ENDPOINT": "http://c:4318/"}, Endpoint("c", 4318)),
        ({}, {"TRACES_ENDPOINT": "https://c"}, Endpoint("c", 443)),
        ({}, {"ENDPOINT": "c:4317"}, None),
        ({"trace_endpoint": "http://d:1"}, {"ENDPOINT": "http://c:2"}, Endpoint("d", 1)),
        ({"trace_exporter": "jaeger"}, {"ENDPOINT": "http://c:2"}, None),  # an agent, over UDP
        (
            {"trace_exporter": "jaeger", "trace_endpoint": "http://d:14268"},
            {},
            Endpoint("d", 14268),
        ),
    ],
)
def test_the_endpoint_is_of_the_settings_or_the_variables(
    monkeypatch, changes, variables, endpoint
):
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    assert endpoint_of(settings(**changes)) == endpoint


def test_an_endpoint_says_why_it_cannot_be_reached(free_port):
    port = free_port()
    assert Endpoint("127.0.0.1", port).problem() == f"nobody listens at 127.0.0.1:{port}"
    assert "nohost.invalid:1: " in str(Endpoint("nohost.invalid", 1).problem())
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        assert Endpoint(host, port).problem() is None
