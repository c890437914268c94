"""Usage of a replica, as it reports it to the autoscaling policy: images, CPU time, cores."""

import time
from collections.abc import Callable
from typing import NamedTuple


class UsageReport(NamedTuple):
    """A replica's figures at one moment; counts are since it began."""

    at: float  # s, by the replica's clock
    images_arrived: float  # refused ones too
    images_done: float
    images_waiting: float  # under way now
    cpu_ms: float  # of the whole process
    cores: float  # that it can use
    expected_cpu_ms: float  # of an image, until it is measured


FIGURES = UsageReport._fields[1:]  # as Serve's controller keeps them, each a series of its own


class Usage:
    """Counts a replica's images; all calls come from its one loop."""

    def __init__(
        self, cores: float, expected_cpu_ms: float, cpu_s: Callable[[], float] = time.process_time
    ) -> None:
        self._cores, self._expected_cpu_ms, self._cpu_s = cores, expected_cpu_ms, cpu_s
        self._num_arrived = 0.0
        self._num_done = self._num_waiting = 0

    @property
    def num_under_way(self) -> int:
        """How many images are worked on."""
        return self._num_waiting

    def refused(self, num_images: float = 1) -> None:
        """Count images that came and were turned away: they want capacity too."""
        self._num_arrived += num_images

    def under_way(self, num_images: int) -> "UnderWay":
        """Count images while the block works on them; if it raises, they are not done.

        So an image that is refused further on does not make the others look cheap.
        """
        return UnderWay(self, num_images)

    def began(self, num_images: int) -> None:
        """Count images that arrive and are worked on."""
        self._num_arrived += num_images
        self._num_waiting += num_images

    def ended(self, num_images: int, *, done: bool) -> None:
        """Count images that are not worked on any more."""
        self._num_waiting -= num_images
        if done:
            self._num_done += num_images

    def figures(self) -> dict[str, float]:
        """Return what Serve's ``record_autoscaling_stats`` is to return."""
        report = UsageReport(
            0.0,
            self._num_arrived,
            self._num_done,
            self._num_waiting,
            self._cpu_s() * 1e3,
            self._cores,
            self._expected_cpu_ms,
        )
        return {name: float(getattr(report, name)) for name in FIGURES}


class UnderWay:
    """The block of :meth:`Usage.under_way`; a class is cheaper than a generator's context."""

    __slots__ = ("_num_images", "_usage")

    def __init__(self, usage: Usage, num_images: int) -> None:
        self._usage, self._num_images = usage, num_images

    def __enter__(self) -> None:
        self._usage.began(self._num_images)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._usage.ended(self._num_images, done=kind is None)
