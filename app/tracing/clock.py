"""Converts times of the monotonic clock, used for stages, to the system clock, used for spans."""

import logging
import time

logger = logging.getLogger("ray.serve")
READINGS, AT_ONCE_NS = 5, 20_000
STEP_NS = 100_000_000  # the system clock was set if it moves this much against the monotonic one


class Clock:
    """Converts times of the monotonic clock, which durations need, to the system clock's."""

    def __init__(self) -> None:
        self.num_steps = 0  # how often the system clock was set
        self._offset_ns = self._now_ns()

    def offset_ns(self) -> int:
        """Return the nanoseconds to add to ``time.monotonic`` for the system's time."""
        offset_ns = self._now_ns()
        if abs(offset_ns - self._offset_ns) > STEP_NS:
            self.num_steps += 1
            if self.num_steps == 1:
                logger.warning(
                    "the system clock was set by %.1f s: spans of requests under way are off by "
                    "that; further steps are only counted",
                    (offset_ns - self._offset_ns) / 1e9,
                )
        self._offset_ns = offset_ns
        return offset_ns

    def _now_ns(self) -> int:
        """Compare the clocks; repeat if the thread was interrupted between the two readings.

        An interruption can take milliseconds on a busy machine, and would move a span out of its
        parent.
        """
        best = None
        for _ in range(READINGS):
            before, now, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
            if after - before < AT_ONCE_NS:
                return now - (before + after) // 2
            reading = after - before, now - (before + after) // 2
            best = reading if best is None else min(best, reading)
        assert best is not None
        return best[1]


clock = Clock()
