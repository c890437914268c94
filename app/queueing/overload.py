"""A limit on requests during overload, and a circuit breaker after failures.

During overload the limit on requests follows the measured rate, by Little's law: requests under way
= rate x time. A fixed limit means a second of waiting on a small machine, and a few milliseconds on
a large one. The limit is the requests that fill a batch on every core, plus those answered within
the target.

Many requests at a time are not yet overload: a burst is answered in time. Overload begins when
requests are refused for lack of room, and still are after many have been answered. It ends when
none was refused for a while. All times are passed in.
"""

import math
import time
from collections import deque
from collections.abc import Callable

from app.settings import Settings

# Overload begins with a refusal after this share of the requests that were under way at the first
# refusal has been answered. While a stage hangs, or a burst arrives, few are answered.
ANSWERED_SHARE = 1 / 4
# ... and if this share of those answered since was refused. It ignores isolated refusals, such as a
# health probe at exactly the limit.
REFUSED_SHARE = 0.02
STILL_SHARE = 1 / 2  # If fewer than this share are still under way, it was a burst.
# Overload ends when none was refused for this time, and this many were admitted meanwhile,
QUIET_S, QUIET_ADMITTED = 3.0, 64
# or when all requests, the refused ones included, could have been answered at this share of the
# rate. Earlier requests count as this many seconds of work at most, so that it ends soon.
USED_SHARE, MAX_BACKLOG_S = 0.9, 1.0
# The rate is the highest of the last windows, as in BBR (Cardwell et al., 2016): a window with a
# stall or with few requests does not make the service look slow.
WINDOW_S, WINDOW_ANSWERED, NUM_WINDOWS = 0.5, 32, 8


class ConcurrencyLimit:
    """Computes how many requests may be under way: ``max_requests``, and fewer under overload.

    ``num_cores`` compute at a time, each a batch of up to ``max_batch_size``. Under overload,
    further requests may wait for ``target_wait_s``.
    """

    def __init__(
        self, max_requests: int, num_cores: int, max_batch_size: int, target_wait_s: float
    ) -> None:
        self._max_requests, self._num_cores = max_requests, num_cores
        self._max_batch_size, self._target_wait_s = max_batch_size, target_wait_s
        self.images_per_request = 1.0  # a recent mean, which the admission sets
        self.is_on = False
        self.crowd = 0  # requests under way at the first refusal; 0 if none was refused lately
        self._num_answered = self._num_refused = 0  # since the first refusal
        self._refused_at = 0.0
        self._num_admitted = 0  # since the last refusal
        self._backlog, self._counted_at = 0.0, 0.0  # the backlog if none had been refused
        self._window_from, self._num_in_window = 0.0, 0
        self._rates: deque[float] = deque(maxlen=NUM_WINDOWS)  # requests/s

    @property
    def value(self) -> int:
        """The limit of requests under way while :attr:`is_on`."""
        in_batches = self._num_cores * self._max_batch_size / self.images_per_request
        # At least one request on each core, and one that is being read or decoded.
        floor = max(self._num_cores + 1.0, in_batches)
        waiting = self._rate * self._target_wait_s
        return min(self._max_requests, math.ceil(floor + waiting - 1e-9))

    @property
    def _rate(self) -> float:
        return max(self._rates, default=0.0)

    def arrived(self, now: float, num: int = 1) -> None:
        """Count requests that arrived, admitted or not; call it while :attr:`is_on`."""
        done = USED_SHARE * self._rate * (now - self._counted_at)
        if self._backlog <= done:
            self._end()
        else:
            most = MAX_BACKLOG_S * self._rate
            self._backlog, self._counted_at = min(most, self._backlog - done + num), now

    def admitted(self, now: float) -> None:
        self._num_admitted += 1
        if self._num_admitted >= QUIET_ADMITTED and now - self._refused_at >= QUIET_S:
            self._end()

    def refused(self, now: float, num_present: int, num: int = 1) -> None:
        """Count ``num`` requests refused for lack of room, while ``num_present`` are under way."""
        self._num_refused += num
        if self.is_on:
            self._refused_at, self._num_admitted = now, 0
        elif not self.crowd:
            self._begin_to_watch(now, num_present)
        elif self._num_answered >= ANSWERED_SHARE * self.crowd:
            if self._num_refused >= REFUSED_SHARE * self._num_answered:
                self._begin(now)
            else:
                self._begin_to_watch(now, num_present)

    def answered(self, now: float, num_present: int) -> None:
        """Count an answered request, and ``num_present`` left; call it while :attr:`crowd`."""
        self._num_answered += 1
        self._num_in_window += 1
        if self.is_on:
            if now - self._window_from >= WINDOW_S and self._num_in_window >= WINDOW_ANSWERED:
                self._end_window(now)
        elif num_present < STILL_SHARE * self.crowd:
            self.crowd = 0

    def _begin_to_watch(self, now: float, num_present: int) -> None:
        if num_present < self.value:  # a late report, or slow uploads took the places
            return
        self.crowd, self._num_answered, self._num_refused = num_present, 0, 0
        self._rates.clear()
        self._window_from, self._num_in_window = now, 0

    def _begin(self, now: float) -> None:
        self._end_window(now)
        self.is_on, self._refused_at, self._num_admitted = True, now, 0
        self._backlog, self._counted_at = MAX_BACKLOG_S * self._rate, now

    def _end_window(self, now: float) -> None:
        if now > self._window_from:
            self._rates.append(self._num_in_window / (now - self._window_from))
        self._window_from, self._num_in_window = now, 0

    def _end(self) -> None:
        self.is_on, self.crowd = False, 0


def limit_of(settings: Settings, num_cores: int) -> ConcurrencyLimit | None:
    """Return the limit of a Gateway whose process computes on ``num_cores`` cores.

    None if the members are deployments of their own: then the Gateway does not know how many cores
    work for it, nor how many other Gateways there are.
    """
    if settings.target_wait_ms is None or settings.members != "gateway":
        return None
    size, target_wait_s = max(settings.batch_sizes), settings.target_wait_ms / 1e3
    return ConcurrencyLimit(settings.max_concurrent_requests, num_cores, size, target_wait_s)


# A Gateway answers by the fast plan from a refusal on, or from this share of its places on. While
# those under way are answered by the plan full, there is room for 1.8 times as many to arrive.
FAST_FROM_SHARE = 0.55
# It does until for ``CALM_S`` none was refused, fewer than this share of the places were taken, and
# requests came at less than this share of the rate that the plan full answers at.
FULL_BELOW_SHARE, FULL_RATE_SHARE, CALM_S = 0.25, 0.9, 1.5
COUNTED_S = 0.5  # each part of ``CALM_S`` must be calm
# The rate is measured when the places fill. It is unknown after that time: images may have changed.
TRUSTED_S = 120.0


class PlanSwitch:
    """Decides when a Gateway that is nearly full answers by the fast plan (setting ``when_full``).

    It compares the rate of arrival with the rate that the plan ``full`` answered at before, so that
    a queue which the fast plan has emptied does not switch back at once. All times are passed in.
    """

    def __init__(self, max_requests: int) -> None:
        self._fast_from = max(2, math.ceil(FAST_FROM_SHARE * max_requests))
        self._full_below = max(1, math.floor(FULL_BELOW_SHARE * max_requests))
        self.is_fast = False
        self.full_rate = math.inf  # requests/s; infinite while it is unknown
        self._measured_at = 0.0
        # Since the places began to fill, until those under way at the change have been answered.
        self._filling_from, self._num_answered, self._num_measured = 0.0, 0, math.inf
        self._part_from, self._num_arrived = 0.0, 0  # the present part of ``CALM_S``
        self._last = self._calm_from = 0.0  # the last arrival; the end of the last part not calm

    def arrived(self, now: float, num_present: int, num: int = 1) -> None:
        """Count ``num`` requests that arrive, admitted or not, with ``num_present`` under way."""
        if self.is_fast:
            if self._num_answered >= self._num_measured:
                self._measure(now)
            if now - self._part_from >= COUNTED_S:
                self._end_part(now, num_present)
            self._num_arrived += num
            self._last = now
        elif num_present < self._full_below:
            self._filling_from, self._num_answered = now, 0
        elif num_present + num > self._fast_from:
            self._begin(now, num_present)

    def answered(self) -> None:
        """Count an answered request."""
        self._num_answered += 1

    def refused(self, now: float, num_present: int) -> None:
        """Note that a request was refused for lack of room, after :meth:`arrived`."""
        if not self.is_fast:
            self._begin(now, num_present)
        self._calm_from = now

    def _begin(self, now: float, num_present: int) -> None:
        self.is_fast, self._num_arrived = True, 0
        self._num_measured = max(self._num_answered + num_present, self._full_below)
        self._part_from = self._last = self._calm_from = now

    def _measure(self, now: float) -> None:
        spent_s = now - self._filling_from
        self.full_rate = self._num_answered / spent_s if spent_s else math.inf
        self._measured_at, self._num_measured = now, math.inf

    def _end_part(self, now: float, num_present: int) -> None:
        if now - self._measured_at >= TRUSTED_S:
            self.full_rate = math.inf
        rate = self._num_arrived / (now - self._part_from)
        is_low = rate < FULL_RATE_SHARE * self.full_rate or now - self._last >= CALM_S
        if num_present >= self._full_below or not is_low:
            self._calm_from = now
        self._part_from, self._num_arrived = now, 0
        if now - self._calm_from >= CALM_S:
            self.is_fast, self._filling_from, self._num_answered = False, now, 0


class CircuitBreaker:
    """After a failure, allows only occasional trials until one succeeds.

    The first is ``first_s`` after a failure; each failed trial doubles the wait. See M. Nygard,
    Release It!, 2007.

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
