"""A sink never waits, never raises, and counts what it loses."""

import logging
import threading
import time

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from app.tracing import sink as sink_module
from app.tracing.exporters import Endpoint
from app.tracing.parents import current_parent
from app.tracing.sink import Sink
from app.tracing.spans import record


class Scripted(SpanExporter):
    """Waits at a gate and gives the results it is told."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.result: SpanExportResult | Exception = SpanExportResult.SUCCESS
        self.num_taken = 0
        self.sizes: list[int] = []  # of all that it was given
        self.is_shut_down = False

    def export(self, spans):
        self.sizes.append(len(spans))
        self.gate.wait(10)
        if isinstance(self.result, Exception):
            raise self.result
        if self.result is SpanExportResult.SUCCESS:
            self.num_taken += len(spans)
        return self.result

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.gate.set()


@pytest.fixture
def exporter() -> Scripted:
    return Scripted()


def test_spans_arrive(exporter, spans):
    sink = Sink("otlp", exporter)
    for span in spans:
        sink.on_end(span)
    sink.shutdown()
    assert exporter.num_taken == len(spans)
    assert exporter.is_shut_down
    assert sink.num_dropped == 0


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
    assert exporter.num_taken == 11


@pytest.mark.parametrize(
    "result", [SpanExportResult.FAILURE, OSError(104, "Connection reset by peer")], ids=str
)
def test_failures_are_counted_and_told_once(exporter, spans, result, caplog, monkeypatch):
    monkeypatch.setattr(sink_module, "ENDPOINT_TRIAL_EVERY_S", 0.0)
    exporter.result = result
    sink = Sink("otlp", exporter)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        for _ in range(3):
            sink.on_end(spans[0])
            sink.force_flush(1000)
        assert sink.num_dropped == 3
        assert len(caplog.records) == 1
        assert "requests are served as before" in caplog.text
        exporter.result = SpanExportResult.SUCCESS
        sink.on_end(spans[0])
        sink.force_flush(1000)
        assert "otlp spans arrive; 3 were lost" in caplog.text
    sink.shutdown()
    assert exporter.num_taken == 1


def test_nobody_at_the_endpoint_is_a_loss_with_its_reason(exporter, spans, free_port, caplog):
    exporter.result = SpanExportResult.FAILURE
    port = free_port()
    sink = Sink("otlp", exporter, Endpoint("127.0.0.1", port))
    sink.on_end(spans[0])
    sink.force_flush(1000)
    assert sink.num_dropped == 1
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert f"otlp spans are lost (nobody listens at 127.0.0.1:{port})" in line.message
    assert "ray_tandem_dropped_spans counts them" in line.message
    sink.shutdown()


def test_who_failed_is_left_alone_for_a_while(exporter, spans):
    """Nothing is encoded for an endpoint that was not there a moment ago."""
    exporter.result = SpanExportResult.FAILURE
    sink = Sink("otlp", exporter)
    for _ in range(3):
        sink.on_end(spans[0])
        sink.force_flush(1000)
        exporter.result = SpanExportResult.SUCCESS  # which is not found out yet
    assert exporter.num_taken == 0
    assert sink.num_dropped == 3
    sink.shutdown()


def test_stopping_does_not_wait_for_who_takes_nothing(exporter, spans):
    exporter.result = SpanExportResult.FAILURE
    sink = Sink("otlp", exporter)
    sink.on_end(spans[0])
    sink.force_flush(1000)
    exporter.gate.clear()  # a retry would wait here; shutdown ends it
    sink.on_end(spans[0])
    sink.shutdown()
    assert exporter.is_shut_down
    assert sink.num_dropped == 2


class Kept(SpanExporter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list = []

    def export(self, spans):
        self.spans += spans
        return SpanExportResult.SUCCESS


def test_all_exporters_have_a_recorded_span_with_the_same_identity(exported, request_span):
    exporters = Kept(), Kept()
    sinks = [Sink("kept", exporter) for exporter in exporters]
    parent = current_parent()
    assert parent
    for number in range(50):
        record("decode", parent, 1.0, 2.0, {"tandem.bytes": number})
    for span in exported.get_finished_spans():
        for sink in sinks:
            sink.on_end(span)
    for sink in sinks:
        sink.shutdown()
    first, second = (exporter.spans for exporter in exporters)
    assert first == second
    assert [span.attributes["tandem.bytes"] for span in first] == list(range(50))
    assert len({span.context.span_id for span in first}) == 50


def test_many_spans_go_in_batches(exporter, spans, monkeypatch):
    monkeypatch.setattr(sink_module, "EVERY_MS", 3.6e6)
    sink = Sink("otlp", exporter)
    for _ in range(1000):
        sink.on_end(spans[0])
    sink.shutdown()
    assert sum(exporter.sizes) == 1000
    assert max(exporter.sizes) <= sink_module.BATCH
