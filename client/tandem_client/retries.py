"""Decides when a call is retried: if safe, not before Retry-After, never past its deadline.

Backoff is exponential with full jitter (M. Brooker, "Exponential Backoff And Jitter", 2015), in
addition to the service's Retry-After. So clients that were refused together do not return together.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from tandem_client.errors import BrokenOff, DeadlineExceeded, Reason, TandemError

LEAST_TOLD_S = 0.001
MAX_BROKEN_OFF = 1  # calls that are sent again after a 502
MOST_DOUBLINGS = 60  # of the waits: far beyond any limit, and still a float


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how soon to retry; ``max_attempts=1`` never retries.

    ``on`` lists the causes: ``overloaded`` (429), ``not_ready`` (503), ``refused`` (no connection),
    ``reset`` (the connection, or a part of the service, ended before the answer). Classifying an
    image again changes nothing in the service, so all of them are safe.
    """

    max_attempts: int = 5
    base_s: float = 0.1  # the first wait is at most this; the maximum doubles with each further one
    max_s: float = 5.0  # the longest wait of the client's own
    on: frozenset[Reason] = frozenset({"overloaded", "not_ready", "refused", "reset"})

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.base_s < 0 or self.max_s < 0:
            raise ValueError(
                f"max_attempts is {self.max_attempts}, base_s {self.base_s}, max_s {self.max_s}; "
                "give at least 1 attempt, and waits of 0 s or more"
            )


class Attempts:
    """The attempts of a call, and the time left for them."""

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
        self._num = self._num_broken = 0

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
        """Return the error of a call whose time has passed."""
        return DeadlineExceeded(
            f"no answer within {self._timeout_s:g} s; try again, or allow more time (timeout)",
            "deadline",
        )

    def wait_s(self, error: TandemError) -> float:
        """Return the seconds to wait before the next attempt.

        Raises:
            TandemError: ``error`` itself, if it must not be retried.

        """
        policy = self._policy
        if error.reason not in policy.on or self._num >= policy.max_attempts:
            raise error
        # The file itself may have ended that part of the service: it must not end all of them.
        self._num_broken += isinstance(error, BrokenOff)
        if self._num_broken > MAX_BROKEN_OFF:
            raise error
        most = min(policy.max_s, policy.base_s * 2.0 ** min(self._num - 1, MOST_DOUBLINGS))
        wait = (error.retry_after_s or 0.0) + self._uniform(0.0, most)
        if self._now() + wait >= self._ends_at:
            raise error
        return wait


def told_s(left_s: float) -> str:
    """Return an attempt's time for the request's header; never 0, which the service refuses."""
    return f"{max(left_s, LEAST_TOLD_S):.3f}"


def checked_timeout_s(timeout_s: float) -> float:
    """Return a call's time after checking it.

    Raises:
        ValueError: it is not a number of seconds above 0.

    """
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"timeout is {timeout_s!r}: give seconds, a number above 0")
    return timeout_s


def retry_after_s(value: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Parse a Retry-After header (RFC 9110, section 10.2.3): seconds, or a date.

    None if it is absent or malformed.
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
    if date.tzinfo is None:  # "-0000": UTC without a known zone
        date = date.replace(tzinfo=timezone.utc)
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    return max(0.0, (date - epoch).total_seconds() - now())
