"""Starts the meter in a replica, and the thread that flushes it."""

import logging
import threading
import time
from typing import Any

import psutil
import ray
from ray import serve
from ray.serve import metrics as serve_metrics
from ray.serve.exceptions import RayServeException

from app.metrics.meter import Meter, meter
from app.metrics.node import NodeMetrics
from app.metrics.table import (
    CLOCK_STEPS,
    DROPPED_SPANS,
    PROCESS_CPU_MS,
    PROCESS_MEMORY,
    Metric,
)
from app.tracing.clock import clock
from app.tracing.pipeline import pipeline

logger = logging.getLogger("ray.serve")
SAMPLE_EVERY_S = 1.0
FLUSH_EVERY = 5  # samples; Ray exports every 10 s, and forgets a gauge that it is not told in 20 s


def start_metrics() -> None:
    """Begin to measure this process if it is a replica; its stages share the meter."""
    if is_replica() and meter.start(ray_instrument):
        node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        Feeder(meter, NodeMetrics(node)).start()


def is_replica() -> bool:
    """Whether Serve runs this process."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


def ray_instrument(metric: Metric) -> Any:
    """Make Ray's counter or gauge; Serve's add deployment, replica and application."""
    tags: Any = metric.tags  # typed as tuples of one
    kind = serve_metrics.Counter if metric.kind == "counter" else serve_metrics.Gauge
    return kind(metric.name, metric.text, tags)


class Feeder(threading.Thread):
    """Takes samples of the machine, and every few of them flushes the meter."""

    def __init__(self, target: Meter, node: NodeMetrics) -> None:
        super().__init__(name="metrics", daemon=True)
        self._meter, self._node = target, node
        self._process = psutil.Process()
        self._cpu_s = time.process_time()
        self._num_samples, self._has_failed = 0, False

    def run(self) -> None:
        """Feed until the process ends, or the meter gave up."""
        while self._meter.is_on:
            self.feed()
            time.sleep(SAMPLE_EVERY_S)

    def feed(self) -> None:
        """Take a sample; at the first time, and every few times after, tell Ray everything."""
        is_due = self._num_samples % FLUSH_EVERY == 0
        self._num_samples += 1
        self._meter.work_off()
        try:
            self._node.sample()
            if is_due:
                self._tell_process()
                self._node.tell(self._meter)
        except Exception as error:  # psutil's, on a machine it does not know
            if not self._has_failed:
                logger.warning("some of the machine's figures cannot be read: %r", error)
            self._has_failed = True
        if is_due:
            self._meter.flush()

    def _tell_process(self) -> None:
        before, self._cpu_s = self._cpu_s, time.process_time()
        self._meter.count(PROCESS_CPU_MS, by=(self._cpu_s - before) * 1e3)
        self._meter.set(PROCESS_MEMORY, self._process.memory_info().rss)
        self._meter.set(CLOCK_STEPS, clock.num_steps)
        for sink, num_dropped in pipeline.dropped.items():
            self._meter.set(DROPPED_SPANS, num_dropped, sink=sink)
