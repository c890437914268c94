"""The figures of a replica's process."""

import psutil
import pytest

from app.metrics.meter import meter
from app.metrics.replica import Feeder
from app.metrics.table import CLOCK_STEPS, DROPPED_SPANS, PROCESS_CPU_MS, PROCESS_MEMORY
from app.tracing.pipeline import pipeline
from tests.support.instruments import Instruments


class Sink:
    name, num_dropped = "otlp", 7


def test_the_process_tells_its_cost_and_its_losses(
    told: Instruments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "sink", Sink())
    feeder = Feeder(meter)
    sum(range(100_000))  # costs CPU time
    feeder.flush()
    assert told.of(PROCESS_MEMORY)[()] > 1e6
    assert told.of(PROCESS_CPU_MS)[()] > 0
    assert told.of(CLOCK_STEPS)[()] >= 0
    assert told.of(DROPPED_SPANS) == {("otlp",): 7}


def test_figures_that_cannot_be_read_are_said_once(
    told: Instruments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(process: psutil.Process) -> None:
        raise NotImplementedError("no /proc here")

    monkeypatch.setattr(psutil.Process, "memory_info", unknown)
    feeder = Feeder(meter)
    for _ in range(3):
        feeder.flush()
    (warning,) = caplog.messages
    assert "no /proc here" in warning
    assert "requests are served as before" in warning


def test_a_feeder_ends_with_the_meter(told: Instruments) -> None:
    meter.is_on = False
    Feeder(meter).run()
    assert told.values == {}
