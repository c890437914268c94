"""The machine's figures, and those of the process."""

from pathlib import Path

import pytest

from app.metrics.meter import meter
from app.metrics.node import CpuTimes, NodeMetrics, cpu_times
from app.metrics.rapl import PackagePower
from app.metrics.replica import Feeder
from app.metrics.table import (
    CLOCK_STEPS,
    DROPPED_SPANS,
    NODE_CPU,
    NODE_CPU_VARIANCE,
    NODE_MEMORY,
    PACKAGE_WATTS,
    PROCESS_MEMORY,
)
from app.tracing.pipeline import pipeline
from tests.support.instruments import Instruments


@pytest.fixture
def no_power(tmp_path: Path) -> PackagePower:
    return PackagePower(tmp_path)


def test_utilisation_and_its_variance(told: Instruments, no_power: PackagePower) -> None:
    times = iter([CpuTimes(0, 0), CpuTimes(1, 2), CpuTimes(3, 4), CpuTimes(3, 4), CpuTimes(3, 6)])
    node = NodeMetrics("10.0.0.1", no_power, lambda: next(times))
    for _ in range(4):
        node.sample()  # 0.5, 1, no time passed, 0
    node.tell(meter)
    assert told.of(NODE_CPU) == {("10.0.0.1",): pytest.approx(0.5)}
    assert told.of(NODE_CPU_VARIANCE) == {("10.0.0.1",): pytest.approx(1 / 6)}


def test_no_samples_no_news(told: Instruments, no_power: PackagePower) -> None:
    NodeMetrics("here", no_power, lambda: CpuTimes(1, 2)).tell(meter)
    assert told.of(NODE_CPU) == {}
    assert told.of(PACKAGE_WATTS) == {}  # absent, not zero
    assert told.of(NODE_MEMORY)["here",] > 0


def test_power_is_told_by_package(told: Instruments) -> None:
    class Power(PackagePower):
        def watts(self) -> dict[str, float]:
            return {"package-0": 42.0}

    NodeMetrics("here", Power()).tell(meter)
    assert told.of(PACKAGE_WATTS) == {("here", "package-0"): 42.0}


def test_the_machines_times_are_sensible() -> None:
    times = cpu_times()
    assert 0 < times.busy < times.total


class Sink:
    name, num_dropped = "otlp", 7


def test_the_process_tells_its_memory_and_its_losses(
    told: Instruments, no_power: PackagePower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "sinks", [Sink()])
    Feeder(meter, NodeMetrics("here", no_power)).feed()
    assert told.of(PROCESS_MEMORY)[()] > 1e6
    assert told.of(CLOCK_STEPS)[()] >= 0
    assert told.of(DROPPED_SPANS) == {("otlp",): 7}


def test_figures_that_cannot_be_read_are_said_once(
    told: Instruments, no_power: PackagePower, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown() -> CpuTimes:
        raise NotImplementedError("no /proc here")

    node = NodeMetrics("here", no_power)
    node._read_cpu = unknown
    feeder = Feeder(meter, node)
    for _ in range(3):
        feeder.feed()
    (warning,) = caplog.messages
    assert "no /proc here" in warning
    assert meter.is_on
