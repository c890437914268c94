"""The replica's side: starts the meter where Serve runs us, and a thread that feeds it."""

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
    BUCKETS_MS,
    CLOCK_STEPS,
    DROPPED_SPANS,
    PROCESS_CPU_MS,
    PROCESS_MEMORY,
    Metric,
)
from app.tracing.pipeline import pipeline
from app.tracing.spans import clock

logger = logging.getLogger("ray.serve")
FLUSH_EVERY_S = 1.0
TELL_EVERY = 5  # flushes


def start_metrics() -> None:
    """Begin to measure this process if it is a replica; its stages share the meter."""
    if is_replica() and meter.start(ray_instrument):
        Feeder(meter, NodeMetrics(ray.util.get_node_ip_address())).start()


def is_replica() -> bool:
    """Whether Serve runs this process."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


def ray_instrument(metric: Metric) -> Any:
    """Make Ray's counter, gauge or histogram; Serve's add deployment, replica and application."""
    match metric.kind:
        case "counter":
            return serve_metrics.Counter(metric.name, metric.text, metric.tags)
        case "gauge":
            return serve_metrics.Gauge(metric.name, metric.text, metric.tags)
        case "histogram":
            return serve_metrics.Histogram(metric.name, metric.text, list(BUCKETS_MS), metric.tags)


class Feeder(threading.Thread):
    """Flushes the meter every second, and every few seconds tells it how the process does."""

    def __init__(self, target: Meter, node: NodeMetrics) -> None:
        super().__init__(name="metrics", daemon=True)
        self._meter, self._node = target, node
        self._process = psutil.Process()
        self._cpu_s = time.process_time()
        self._num_rounds, self._has_failed = 0, False

    def run(self) -> None:
        """Feed until the process ends, or the meter gave up."""
        while self._meter.is_on:
            self.feed()
            time.sleep(FLUSH_EVERY_S)

    def feed(self) -> None:
        """Sample, and flush; at the first time and every few times after tell everything."""
        try:
            self._read()
        except Exception as error:  # psutil's, on a machine it does not know
            if not self._has_failed:
                logger.warning("some of the machine's figures cannot be read: %r", error)
            self._has_failed = True
        self._meter.flush()

    def _read(self) -> None:
        self._num_rounds += 1
        self._node.sample()
        if self._num_rounds % TELL_EVERY == 1:
            self._tell_process()
            self._node.tell(self._meter)

    def _tell_process(self) -> None:
        before, self._cpu_s = self._cpu_s, time.process_time()
        self._meter.count(PROCESS_CPU_MS, by=(self._cpu_s - before) * 1e3)
        self._meter.set(PROCESS_MEMORY, self._process.memory_info().rss)
        self._meter.set(CLOCK_STEPS, clock.num_steps)
        for sink, num_dropped in pipeline.dropped.items():
            self._meter.set(DROPPED_SPANS, num_dropped, sink=sink)
