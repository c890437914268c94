"""Metrics of the machine: CPU utilisation and its variation, memory, power."""

from collections.abc import Callable
from statistics import fmean, pvariance
from typing import NamedTuple

import psutil

from app.metrics.meter import Meter
from app.metrics.rapl import PackagePower
from app.metrics.table import NODE_CPU, NODE_CPU_VARIANCE, NODE_MEMORY, PACKAGE_WATTS


class CpuTimes(NamedTuple):
    """Seconds of all cores since the machine began."""

    busy: float
    total: float


def cpu_times() -> CpuTimes:
    """Read the machine's CPU times."""
    times = psutil.cpu_times()
    # The kernel counts guests' time as user time too.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return CpuTimes(total - times.idle - getattr(times, "iowait", 0.0), total)


class NodeMetrics:
    """Takes a sample a second and tells what they come to, tagged with the node."""

    def __init__(
        self,
        node: str,
        power: PackagePower | None = None,
        read_cpu: Callable[[], CpuTimes] = cpu_times,
    ) -> None:
        self._node, self._read_cpu = node, read_cpu
        self._power = power or PackagePower()
        self._last = read_cpu()
        self._samples: list[float] = []

    def sample(self) -> None:
        """Note how busy the cores were since the sample before, 0..1."""
        before, self._last = self._last, self._read_cpu()
        if (total := self._last.total - before.total) > 0:
            self._samples.append(min(1.0, max(0.0, (self._last.busy - before.busy) / total)))

    def tell(self, meter: Meter) -> None:
        """Tell what the samples since the last time come to."""
        samples, self._samples = self._samples, []
        if samples:
            meter.set(NODE_CPU, fmean(samples), node=self._node)
            meter.set(NODE_CPU_VARIANCE, pvariance(samples), node=self._node)
        memory = psutil.virtual_memory()
        meter.set(NODE_MEMORY, memory.total - memory.available, node=self._node)
        for package, watts in self._power.watts().items():
            meter.set(PACKAGE_WATTS, watts, node=self._node, package=package)
