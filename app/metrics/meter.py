"""The meter of this process: aggregates counts and sends them to Ray every few seconds.

A call of Ray's API costs microseconds, a call here a tenth of that. Nothing raises: the first error
is logged and stops the meter, so that requests are not affected.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from app.metrics.table import BUCKETS_MS, METRICS, Metric

logger = logging.getLogger("ray.serve")
Tags = tuple[tuple[str, str], ...]
Series = tuple[str, Tags]  # a metric's name and tags
BOUNDS = (*(f"{bound:g}" for bound in BUCKETS_MS), "+Inf")


class Meter:
    """Collects metrics once :meth:`start` was called; before that, does nothing."""

    def __init__(self) -> None:
        self.is_on = False
        self._instruments: dict[str, Any] = {}
        self._counts: dict[Series, float] = {}  # since the last flush
        self._levels: dict[Series, float] = {}
        self._histograms: dict[Series, _Histogram] = {}
        self._lock = threading.Lock()

    def start(self, make: Callable[[Metric], Any]) -> bool:
        """Make an instrument for every metric with ``make``; return False if that was done before.

        All stages of a process share the meter, and each of them starts it.
        """
        with self._lock:
            if self._instruments:
                return False
            parts = [part for metric in METRICS for part in metric.parts]
            self._instruments = {part.name: make(part) for part in parts}
            self.is_on = True
            return True

    def count(self, metric: Metric, by: float = 1.0, **tags: str) -> None:
        if self.is_on and by > 0:
            series = (metric.name, tuple(tags.items()))
            with self._lock:
                self._counts[series] = self._counts.get(series, 0.0) + by

    def set(self, metric: Metric, value: float, **tags: str) -> None:
        if self.is_on:
            with self._lock:
                self._levels[metric.name, tuple(tags.items())] = value

    def observe(self, metric: Metric, value: float, **tags: str) -> None:
        """Add a value to a metric's histogram."""
        if self.is_on:
            series = (metric.name, tuple(tags.items()))
            with self._lock:
                if (histogram := self._histograms.get(series)) is None:
                    histogram = self._histograms[series] = _Histogram()
                histogram.add(value)

    def observe_all(self, metric: Metric, values: Iterable[tuple[Tags, float]]) -> None:
        """Add values to a metric's histograms, each to that of its tags."""
        if not self.is_on:
            return
        with self._lock:
            for tags, value in values:
                if (histogram := self._histograms.get((metric.name, tags))) is None:
                    histogram = self._histograms[metric.name, tags] = _Histogram()
                histogram.add(value)

    def flush(self, record: Callable[[], None] = lambda: None) -> None:
        """Send everything to Ray; gauges too, since Ray forgets a gauge that is not set again.

        ``record`` is called first: it records figures that are read only now.
        """
        try:
            record()
            with self._lock:
                counts, self._counts = self._counts, {}
                levels = dict(self._levels)
                for (name, tags), histogram in self._histograms.items():
                    levels |= histogram.levels(name, tags)
            for (name, tags), amount in counts.items():
                self._instruments[name].inc(amount, dict(tags))
            for (name, tags), value in levels.items():
                self._instruments[name].set(value, dict(tags))
        except Exception as error:
            if self.is_on:
                self.is_on = False
                logger.warning(
                    "metrics are off from here on, requests are served as before: %s: %s",
                    type(error).__name__,
                    error,
                )


class _Histogram:
    """Counts values by bucket since the process began."""

    def __init__(self) -> None:
        self._counts = [0] * len(BOUNDS)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(BUCKETS_MS, value)] += 1
        self._sum += value

    def levels(self, name: str, tags: Tags) -> dict[Series, float]:
        """Return the values of the parts; as in Prometheus a bucket includes all lower ones."""
        below = zip(BOUNDS, accumulate(self._counts), strict=True)
        levels: dict[Series, float] = {
            (f"{name}_bucket", (*tags, ("le", bound))): number for bound, number in below
        }
        levels[f"{name}_sum", tags] = self._sum
        levels[f"{name}_count", tags] = sum(self._counts)
        return levels


meter = Meter()
