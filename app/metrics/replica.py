"""Starts the meter in a replica, and the thread that flushes it."""

import threading
import time
from typing import Any

import psutil
from ray import serve
from ray.serve import metrics as serve_metrics
from ray.serve.exceptions import RayServeException

from app.metrics.meter import Meter, meter
from app.metrics.table import CLOCK_STEPS, DROPPED_SPANS, PROCESS_CPU_MS, PROCESS_MEMORY, Metric
from app.tracing.clock import clock
from app.tracing.pipeline import pipeline

FLUSH_EVERY_S = 5.0  # Ray exports every 10 s, and forgets a gauge that was not set for 20 s


def start_metrics() -> None:
    """Start the meter if this process is a replica of Serve; its stages share it."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return
    if meter.start(ray_instrument):
        Feeder(meter).start()


def ray_instrument(metric: Metric) -> Any:
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
        self._meter.count(PROCESS_CPU_MS, by=(self._cpu_s - before) * 1e3)
        self._meter.set(PROCESS_MEMORY, self._process.memory_info().rss)
        self._meter.set(CLOCK_STEPS, clock.num_steps)
        for sink, num_dropped in pipeline.dropped.items():
            self._meter.set(DROPPED_SPANS, num_dropped, sink=sink)
