"""The process's one meter: what is counted and set here goes to Ray once a second.

A call of Ray's API costs microseconds, a count here a tenth of that. Nothing raises: trouble with
metrics is logged once, switches them off, and is no request's trouble.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from app.metrics.table import METRICS, Metric

logger = logging.getLogger("ray.serve")
Series = tuple[str, tuple[tuple[str, str], ...]]  # a metric's name, its tags


class Meter:
    """Does nothing until it is started."""

    def __init__(self) -> None:
        self.is_on = False
        self._instruments: dict[str, Any] = {}
        self._counts: dict[Series, float] = {}  # since the last flush
        self._levels: dict[Series, float] = {}
        self._lock = threading.Lock()

    def start(self, make: Callable[[Metric], Any]) -> bool:
        """Make every metric's instrument, which has the methods of Ray's; False if they are made.

        The stages of a process share the meter, and each of them starts it.
        """
        with self._lock:
            if self._instruments:
                return False
            self._instruments = {metric.name: make(metric) for metric in METRICS}
            self.is_on = True
            return True

    def count(self, metric: Metric, by: float = 1.0, **tags: str) -> None:
        """Add to a counter."""
        if self.is_on and by > 0:
            series = (metric.name, tuple(tags.items()))
            with self._lock:
                self._counts[series] = self._counts.get(series, 0.0) + by

    def set(self, metric: Metric, value: float, **tags: str) -> None:
        """Set a gauge; it is told to Ray again and again, which forgets what it does not hear."""
        if self.is_on:
            with self._lock:
                self._levels[metric.name, tuple(tags.items())] = value

    def observe(self, metric: Metric, value: float, **tags: str) -> None:
        """Put a value into a histogram, at once."""
        if self.is_on:
            try:
                self._instruments[metric.name].observe(value, tags)
            except Exception as error:
                self._give_up(error)

    def flush(self) -> None:
        """Hand counts and gauges to Ray."""
        with self._lock:
            counts, self._counts = self._counts, {}
            levels = dict(self._levels)
        try:
            for (name, tags), amount in counts.items():
                self._instruments[name].inc(amount, dict(tags))
            for (name, tags), value in levels.items():
                self._instruments[name].set(value, dict(tags))
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self.is_on:
            self.is_on = False
            logger.warning(
                "metrics are off from here on, requests are served as before: %s: %s",
                type(error).__name__,
                error,
            )


meter = Meter()
