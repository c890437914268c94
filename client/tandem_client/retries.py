"""When a call is tried again: what is safe, not before Retry-After, never past its deadline.

Backoff is exponential with full jitter (M. Brooker, "Exponential Backoff And Jitter", 2015), on top
of what the service says: clients that were refused together do not come back together.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from tandem_client.errors import DeadlineExceeded, Reason, TandemError

LEAST_TOLD_S = 0.001


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how soon; ``max_attempts=1`` never tries again.

    ``on`` says after what: ``overloaded`` (429), ``not_ready`` (503), ``refused`` (no connection),
    ``reset`` (a connection that ended before its answer was there). To classify an image again
    changes nothing in the service, so that all of them are safe.
    """

    max_attempts: int = 5
    base_s: float = 0.1  # the first wait is up to this, each further one up to twice as long
    max_s: float = 5.0  # no wait of the client's own is longer
    on: frozenset[Reason] = frozenset({"overloaded", "not_ready", "refused", "reset"})

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.base_s < 0 or self.max_s < 0:
            raise ValueError(
                f"max_attempts is {self.max_attempts}, base_s {self.base_s}, max_s {self.max_s}; "
                "give at least 1 attempt, and waits of 0 s or more"
            )


class Attempts:
    """The attempts of one call, and the time that is left for them."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._policy, self._timeout_s = policy, checked_timeout_s(timeout_s)
        self._now, self._uniform = now, uniform
        self._ends_at = now() + timeout_s
        self._num = 0

    def begin(self) -> float:
        """Count an attempt; return how many seconds it may take.

        Raises:
            DeadlineExceeded: none are left.

        """
        self._num += 1
        return self.left_s()

    def left_s(self) -> float:
        """Return the seconds until the call's deadline.

        Raises:
            DeadlineExceeded: none are left.

        """
        left = self._ends_at - self._now()
        if left <= 0:
            raise self.exceeded()
        return left

    def exceeded(self) -> DeadlineExceeded:
        """Return the error of a call whose time is over."""
        return DeadlineExceeded(
            f"no answer within {self._timeout_s:g} s; try again, or allow more time (timeout)",
            "deadline",
        )

    def wait_s(self, error: TandemError) -> float:
        """Return how long to wait before the next attempt.

        Raises:
            TandemError: ``error`` itself, if there is to be no further attempt.

        """
        policy = self._policy
        if error.reason not in policy.on or self._num >= policy.max_attempts:
            raise error
        most = min(policy.max_s, policy.base_s * 2 ** (self._num - 1))
        wait = (error.retry_after_s or 0.0) + self._uniform(0.0, most)
        if self._now() + wait >= self._ends_at:
            raise error
        return wait


def told_s(left_s: float) -> str:
    """Return the time that an attempt has as the service is told it: never 0, which is refused."""
    return f"{max(left_s, LEAST_TOLD_S):.3f}"


def checked_timeout_s(timeout_s: float) -> float:
    """Return a call's time.

    Raises:
        ValueError: it is no number of seconds above 0.

    """
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"timeout is {timeout_s!r}: give seconds, a number above 0")
    return timeout_s


def retry_after_s(value: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Read a Retry-After header (RFC 9110, section 10.2.3): seconds, or a date.

    None if it is absent, or neither.
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    if date.tzinfo is None:  # "-0000": a time in UTC of unknown zone
        date = date.replace(tzinfo=timezone.utc)
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    return max(0.0, (date - epoch).total_seconds() - now())
