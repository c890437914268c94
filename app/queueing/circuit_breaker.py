"""A circuit breaker: after a failure, allows only occasional trials until one succeeds.

See M. Nygard, Release It!, 2007.
"""

import time
from collections.abc import Callable


class CircuitBreaker:
    """Allows one trial ``first_s`` after a failure; each failed trial doubles the wait.

    ``longest_s`` is the longest wait between two trials.
    """

    def __init__(
        self,
        first_s: float = 1.0,
        longest_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s, self._longest_s, self._clock = first_s, longest_s, clock
        self.is_open = False  # whether the last call failed
        self._is_on_trial = False
        self._wait_s = first_s
        self._next_trial = 0.0

    def allows(self) -> bool:
        """Whether a call may be made now; with an open circuit it is the trial."""
        if not self.is_open:
            return True
        now = self._clock()
        if now < self._next_trial:
            return False
        self._next_trial = now + self._wait_s  # no second trial while this one is under way
        self._is_on_trial = True
        return True

    def succeeded(self) -> bool:
        """Close the circuit; return whether it was open."""
        was_open, self.is_open, self._is_on_trial = self.is_open, False, False
        return was_open

    def failed(self) -> bool:
        """Open the circuit, and return whether it was closed.

        Calls that began before it opened count as one failure.
        """
        was_closed, self.is_open = not self.is_open, True
        if was_closed:
            self._wait_s = self._first_s
        elif self._is_on_trial:
            self._wait_s = min(2 * self._wait_s, self._longest_s)
        else:
            return False
        self._is_on_trial = False
        self._next_trial = self._clock() + self._wait_s
        return was_closed
