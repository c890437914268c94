"""How fast work leaves a place, to tell who comes next how long it will take."""

import math
import time
from collections.abc import Callable

# Of busy time. Shorter, and a burst at which the first answers come late would look like a slow
# service; longer, and one that has become slow would not.
MEMORY_S = 30.0
ENOUGH = 16  # of what was done: fewer are no measure


class Pace:
    """Counts what is there and how fast it leaves.

    Only time in which something was there counts, so a quiet service does not look like a slow one,
    and what hangs slows the pace while it hangs. By Little's law, what comes now leaves when as
    much as is there has left. The pace is an exponentially weighted mean over ``MEMORY_S``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_there = 0
        self._marked = 0.0  # what follows depends on no later time
        self._busy_s = self._num_done = 0.0  # both fade

    def came(self, num: int = 1) -> None:
        """Count what begins to wait."""
        self._mark()
        self.num_there += num

    def done(self, num: int = 1) -> None:
        """Count what is done, and so no longer there."""
        self._mark()
        self.num_there -= num
        self._num_done += num

    def gave_up(self, num: int = 1) -> None:
        """Count what left without being done: it makes the pace no better."""
        self._mark()
        self.num_there -= num

    def wait_s(self, num_ahead: int) -> float:
        """Return the seconds that ``num_ahead`` will take; 0 while no pace is known."""
        busy_s, num_done = self._now()
        return num_ahead * busy_s / num_done if num_done >= ENOUGH else 0.0

    def _mark(self) -> None:
        self._busy_s, self._num_done = self._now()
        self._marked = self._clock()

    def _now(self) -> tuple[float, float]:
        if not self.num_there:
            return self._busy_s, self._num_done
        kept = math.exp((self._marked - self._clock()) / MEMORY_S)
        return self._busy_s * kept + MEMORY_S * (1 - kept), self._num_done * kept
