"""The usage report of a replica to the autoscaling policy: images, CPU time, cores."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class UsageReport(NamedTuple):
    """A replica's figures at one moment; counts are since its start."""

    at: float  # s, by the replica's clock
    images_arrived: float  # refused ones included
    images_done: float
    images_waiting: float  # under way
    cpu_ms: float  # of the whole process, without copies for a shadow version
    cores: float  # that the replica can use
    expected_cpu_ms: float  # for an image, before it is measured


FIGURES = UsageReport._fields[1:]  # Serve's controller keeps a series for each


class Usage:
    """Counts a replica's images; all calls must come from its event loop."""

    def __init__(
        self, cores: float, expected_cpu_ms: float, cpu_s: Callable[[], float] = time.process_time
    ) -> None:
        self._cores, self._expected_cpu_ms, self._cpu_s = cores, expected_cpu_ms, cpu_s
        self._num_arrived = self._copies_ms = 0.0
        self._num_done = self._num_waiting = 0

    @property
    def num_under_way(self) -> int:
        return self._num_waiting

    def refused(self, num_images: float = 1) -> None:
        """Count refused images, which are demand too."""
        self._num_arrived += num_images

    @contextmanager
    def under_way(self, num_images: int) -> Iterator[None]:
        """Count images as under way during the block; if it raises, they do not count as done.

        Otherwise images that a later stage refuses would lower the cost per image.
        """
        self.began(num_images)
        is_done = False
        try:
            yield
            is_done = True
        finally:
            self.ended(num_images, done=is_done)

    def began(self, num_images: int) -> None:
        self._num_arrived += num_images
        self._num_waiting += num_images

    def ended(self, num_images: int, *, done: bool) -> None:
        self._num_waiting -= num_images
        if done:
            self._num_done += num_images

    def copied(self, cpu_ms: float) -> None:
        """Exclude a shadow's CPU time from the cost per image: copies only use idle cores."""
        self._copies_ms += cpu_ms

    def figures(self) -> dict[str, float]:
        """Return the figures for Serve's ``record_autoscaling_stats``."""
        values = (
            self._num_arrived,
            self._num_done,
            self._num_waiting,
            self._cpu_s() * 1e3 - self._copies_ms,
            self._cores,
            self._expected_cpu_ms,
        )
        return dict(zip(FIGURES, map(float, values), strict=True))
