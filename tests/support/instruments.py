"""Instruments as Ray's are, which refuse what Ray's refuse."""

from collections import defaultdict
from itertools import pairwise

from app.telemetry.metric_table import Metric
from app.telemetry.metrics import meter


class Instruments:
    """Makes them, and keeps what they were told: by metric, by the tags' values in order."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        self.raises: Exception | None = None

    def make(self, metric: Metric) -> "Instrument":
        return Instrument(metric, self)

    def observed(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """Return how many values each series of a histogram has; its buckets must agree."""
        bucket, _, count = (part.name for part in metric.parts)
        meter.flush()
        for tags, number in self.values[count].items():
            counts = [n for key, n in self.values[bucket].items() if key[:-1] == tags]
            assert counts[-1] == number
            assert all(low <= high for low, high in pairwise(counts))
        return self.values[count]

    def of(self, metric: Metric) -> dict[tuple[str, ...], float]:
        meter.flush()
        return self.values[metric.name]


class Instrument:
    def __init__(self, metric: Metric, told: Instruments) -> None:
        self._metric, self._told = metric, told

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert self._metric.kind == "counter"
        assert value > 0
        series = self._told.values[self._metric.name]
        key = self._key(tags)
        series[key] = series.get(key, 0.0) + value

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert self._metric.kind == "gauge"
        self._told.values[self._metric.name][self._key(tags)] = value

    def _key(self, tags: dict[str, str]) -> tuple[str, ...]:
        if self._told.raises:
            raise self._told.raises
        assert set(tags) == set(self._metric.tags), self._metric.name
        assert all(isinstance(value, str) for value in tags.values())
        return tuple(tags[name] for name in self._metric.tags)
