"""Liveness of one member's network; backs Serve's ``check_health``."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.errors import UnhealthyError

MAX_FAILURES = 3  # batches in a row
MAX_RUN_S = 30.0  # a batch of the largest size takes a fraction of a second
REPLACED = "Serve replaces the replica; its log has the errors"


class Health:
    """Hears of every run of a network; a replica that is unhealthy is replaced by Serve."""

    def __init__(self, member: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._member, self._clock = member, clock
        self._num_failures = 0
        self._running: dict[int, float] = {}  # since when, by a number of its own
        self._num_runs = 0

    @contextmanager
    def run(self) -> Iterator[None]:
        """Watch one batch; a caller that goes away is no failure."""
        number = self._num_runs = self._num_runs + 1
        self._running[number] = self._clock()
        try:
            yield
            self._num_failures = 0
        except Exception:
            self._num_failures += 1
            raise
        finally:
            del self._running[number]

    def check(self) -> None:
        """Say nothing if all is well.

        Raises:
            UnhealthyError: the last batches all failed, or one does not end.

        """
        if self._num_failures >= MAX_FAILURES:
            raise UnhealthyError(
                f"the last {self._num_failures} batches of {self._member} failed; {REPLACED}"
            )
        since = min(self._running.values(), default=None)
        if since is not None and (taken_s := self._clock() - since) > MAX_RUN_S:
            raise UnhealthyError(
                f"a batch of {self._member} has run for {taken_s:.0f} s, the limit is "
                f"{MAX_RUN_S:g}; {REPLACED}"
            )
