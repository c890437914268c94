"""A circuit breaker: what has just failed is left alone, but for one trial now and then.

M. Nygard, Release It!, 2007.
"""

import time
from collections.abc import Callable

RETRY_AFTER_S = 1.0
LONGEST_S = 10.0  # between two trials of what goes on failing


class Breaker:
    """Allows one trial after a while; each that fails doubles the time until the next one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wait_s = 0.0
        self._next_trial = 0.0
        self._is_on_trial = False

    @property
    def is_open(self) -> bool:
        """Whether the last try failed."""
        return self._wait_s > 0

    def allows(self) -> bool:
        """Whether to try now; of an open circuit that is the one trial."""
        if not self.is_open:
            return True
        now = self._clock()
        if now < self._next_trial:
            return False
        self._next_trial = now + self._wait_s  # others do not try beside it
        self._is_on_trial = True
        return True

    def succeeded(self) -> bool:
        """Close the circuit; tell whether it was open."""
        was_open, self._wait_s, self._is_on_trial = self.is_open, 0.0, False
        return was_open

    def failed(self) -> bool:
        """Open the circuit; tell whether it was closed. Tries that began before it count once."""
        was_closed = not self.is_open
        if was_closed:
            self._wait_s = RETRY_AFTER_S
        elif self._is_on_trial:
            self._wait_s = min(2 * self._wait_s, LONGEST_S)
        else:
            return False
        self._is_on_trial = False
        self._next_trial = self._clock() + self._wait_s
        return was_closed
