"""Liveness of a stage's work (batches, decoding, functions), for ``check_health``."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from app.errors import UnhealthyError

MAX_FAILURES = 3  # in a row
MAX_RUN_S = 30.0  # far above the largest batch, or the largest picture, which takes a second
REPLACED = "Serve replaces the replica; its log has the errors"


class Health:
    """Watches every run of some work, on any thread; Serve replaces an unhealthy replica.

    Args:
        work: its name in the singular, for errors: "batch of resnet50".
        clock: returns seconds.
        counts_failures: whether repeated failures are unhealthy; False if a client's file may cause
            them.

    """

    def __init__(
        self,
        work: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        counts_failures: bool = True,
    ) -> None:
        self._work, self._clock, self._counts_failures = work, clock, counts_failures
        self._num_failures = 0
        self._running: dict[int, float] = {}  # start times, by the run's number
        self._numbers = count()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Watch the block as a run; a cancelled caller is not a failure."""
        number = next(self._numbers)
        self._running[number] = self._clock()
        try:
            yield
        except Exception:
            self._num_failures += self._counts_failures
            raise
        else:
            self._num_failures = 0
        finally:
            del self._running[number]

    def check(self) -> None:
        """Raise :class:`UnhealthyError` if the last runs all failed, or a run does not end."""
        if self._num_failures >= MAX_FAILURES:
            raise UnhealthyError(
                f"{self._num_failures} times in a row a {self._work} failed; {REPLACED}"
            )
        since = min(list(self._running.values()), default=None)  # a copy: threads may change it
        if since is not None and (taken_s := self._clock() - since) > MAX_RUN_S:
            raise UnhealthyError(
                f"a {self._work} has run for {taken_s:.0f} s, the limit is "
                f"{MAX_RUN_S:g}; {REPLACED}"
            )
