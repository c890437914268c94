"""Estimates waiting time from queue length and recent completion rate (Little's law)."""

import math
import time
from collections.abc import Callable

# Of busy time. Shorter, and a burst at which the first answers come late would look like a slow
# service; longer, and one that has become slow would not.
TIME_CONSTANT_S = 30.0
MIN_COMPLETED = 16  # of what was done: fewer are no measure


class ServiceRate:
    """Counts what is there and how fast it leaves.

    Only time in which something was there counts, so a quiet service does not look like a slow one,
    and what hangs slows the pace while it hangs. By Little's law, what comes now leaves when as
    much as is there has left. The pace is an exponentially weighted mean over ``TIME_CONSTANT_S``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_present = 0
        self._marked = 0.0  # what follows depends on no later time
        self._busy_s = self._num_done = 0.0  # both fade

    def arrived(self, num: int = 1) -> None:
        """Count what begins to wait."""
        self._mark()
        self.num_present += num

    def done(self, num: int = 1) -> None:
        """Count what is done, and so no longer there."""
        self._mark()
        self.num_present -= num
        self._num_done += num

    def abandoned(self, num: int = 1) -> None:
        """Count what left without being done: it makes the pace no better."""
        self._mark()
        self.num_present -= num

    def wait_s(self, num_ahead: int) -> float:
        """Return the seconds that ``num_ahead`` will take; 0 while no pace is known."""
        busy_s, num_done = self._now()
        return num_ahead * busy_s / num_done if num_done >= MIN_COMPLETED else 0.0

    def _mark(self) -> None:
        self._busy_s, self._num_done = self._now()
        self._marked = self._clock()

    def _now(self) -> tuple[float, float]:
        if not self.num_present:
            return self._busy_s, self._num_done
        kept = math.exp((self._marked - self._clock()) / TIME_CONSTANT_S)
        return self._busy_s * kept + TIME_CONSTANT_S * (1 - kept), self._num_done * kept
