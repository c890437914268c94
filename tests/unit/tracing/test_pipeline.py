"""The pipeline: a sink by the settings, once in a process, and no traces of health checks."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from app.settings import Settings
from app.tracing import pipeline as pipeline_module
from app.tracing.parents import current_parent, orphans
from app.tracing.pipeline import Pipeline
from app.tracing.spans import outlets


class Kept(SpanExporter):
    def __init__(self) -> None:
        self.names: list[str] = []

    def export(self, spans):
        self.names += [span.name for span in spans]
        return SpanExportResult.SUCCESS


@pytest.fixture
def exporter(monkeypatch) -> Kept:
    kept = Kept()
    monkeypatch.setattr(pipeline_module, "exporter_of", lambda settings: kept)
    monkeypatch.setattr(pipeline_module, "endpoint_of", lambda settings: None)
    return kept


@pytest.fixture
def asked() -> Pipeline:
    pipeline = Pipeline()
    pipeline.is_asked_for = True
    return pipeline


def test_spans_go_to_the_exporter_once(asked, exporter, spans):
    asked.start(Settings())
    sink = asked.sink
    asked.start(Settings())  # a second stage in the process
    assert asked.sink is sink
    for span in spans:
        asked.on_end(span)
    asked.shutdown()
    assert exporter.names == [span.name for span in spans]
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
    assert exporter.names == ["replica_handle_request Gateway __call__"]


@pytest.mark.parametrize(
    "path",
    [
        "GET /healthz",
        "HEAD /readyz",
        "GET /v2/health/ready",
        "grpc.health.v1.Health/Check",
        "inference.GRPCInferenceService/ServerLive",
    ],
)
def test_health_checks_are_left_out(asked, exporter, request_span, exported, path):
    request_span.update_name(path)
    request_span.end()
    asked.start(Settings())
    asked.on_end(exported.get_finished_spans()[0])
    asked.shutdown()
    assert exporter.names == []


@pytest.mark.parametrize("exporter_name", ["none", "otlp"])
def test_without_a_collector_nothing_starts(asked, spans, monkeypatch, exporter_name):
    for name in ("ENDPOINT", "TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    before = list(outlets)
    asked.start(Settings(trace_exporter=exporter_name))
    asked.on_end(spans[0])
    assert asked.force_flush()
    asked.shutdown()
    assert (asked.sink, asked.dropped, outlets) == (None, {}, before)


def test_without_serves_tracing_nothing_starts(exporter):
    pipeline = Pipeline()
    pipeline.start(Settings())
    assert pipeline.sink is None


def test_serve_gets_the_processor_and_the_environment_its_names(monkeypatch):
    fresh = Pipeline()
    monkeypatch.setattr(pipeline_module, "pipeline", fresh)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    assert pipeline_module.span_processors() == [fresh]
    assert fresh.is_asked_for
    import os

    assert os.environ["OTEL_SERVICE_NAME"] == "tandem"
    assert "deployment.environment=test" in os.environ["OTEL_RESOURCE_ATTRIBUTES"]
    assert "host.name=" in os.environ["OTEL_RESOURCE_ATTRIBUTES"]
