"""Liveness of a stage: batches of a network, or the decoding of files; backs ``check_health``."""

import time
from collections.abc import Callable
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

    def run(self) -> "WatchedRun":
        """Watch a block as one run; a caller that goes away is no failure."""
        return WatchedRun(self, next(self._numbers))

    def began(self, number: int) -> None:
        """Note a run that begins."""
        self._running[number] = self._clock()

    def ended(self, number: int, kind: type[BaseException] | None) -> None:
        """Note how a run ended: with an exception of ``kind``, or well."""
        del self._running[number]
        if kind is None:
            self._num_failures = 0
        elif issubclass(kind, Exception):
            self._num_failures += self._counts_failures

    def check(self) -> None:
        """Say nothing if all is well.

        Raises:
            UnhealthyError: the last runs all failed, or one does not end.

        """
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


class WatchedRun:
    """The block of :meth:`Health.run`."""

    __slots__ = ("_health", "_number")

    def __init__(self, health: Health, number: int) -> None:
        self._health, self._number = health, number

    def __enter__(self) -> None:
        self._health.began(self._number)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._health.ended(self._number, kind)
