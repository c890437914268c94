"""Liveness of a stage: batches of a network, or the decoding of files; backs ``check_health``."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from app.errors import UnhealthyError

MAX_FAILURES = 3  # batches in a row
MAX_RUN_S = 30.0  # the largest batch takes a fraction of a second, the largest picture one
REPLACED = "Serve replaces the replica; its log has the errors"


class Health:
    """Watches every run of some work, on whichever threads; Serve replaces what is unhealthy.

    Args:
        work: what is run, in the singular, for the error: "batch of resnet50".
        counts_failures: whether failures in a row are unhealthy too; not so where a client's file
            may cause them.

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
        self._running: dict[int, float] = {}  # since when, by a number of its own
        self._numbers = count()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Watch a block as one run; a caller that goes away is no failure."""
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
        """Raise :class:`UnhealthyError` if the last runs all failed, or one does not end."""
        if self._num_failures >= MAX_FAILURES:
            raise UnhealthyError(
                f"{self._num_failures} times in a row a {self._work} failed; {REPLACED}"
            )
        since = min(list(self._running.values()), default=None)  # threads may change it
        if since is not None and (taken_s := self._clock() - since) > MAX_RUN_S:
            raise UnhealthyError(
                f"a {self._work} has run for {taken_s:.0f} s, the limit is "
                f"{MAX_RUN_S:g}; {REPLACED}"
            )
