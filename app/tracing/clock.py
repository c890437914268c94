"""From the monotonic clock, by which stages are timed, to the system's, which spans carry."""

import logging
import time

logger = logging.getLogger("ray.serve")
READINGS, AT_ONCE_NS = 5, 20_000
STEP_NS = 100_000_000  # the system clock moved by so much against the monotonic one: it was set


class Clock:
    """From the monotonic clock, which durations need, to the system's, which spans carry."""

    def __init__(self) -> None:
        self.num_steps = 0  # how often the system clock was seen to have been set
        self._offset_ns = self._now_ns()

    def offset_ns(self) -> int:
        """Return what to add to nanoseconds of ``time.monotonic`` now."""
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
        """Compare the clocks; again if the thread was interrupted between one and the other.

        On a busy machine that is milliseconds, by which a span would lie beside its parent.
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
