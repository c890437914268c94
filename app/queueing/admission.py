"""Admission control: limits requests, uploads and their bytes; and counts images, for scaling.

Three limits apply: requests under way, the bytes of bodies that a Gateway holds, and the time of an
upload. When the places run out, the slowest upload is cancelled. :mod:`app.queueing.overload` sets
the limit on requests during overload.

Callers share the places. A caller who holds fewer than its share is admitted although they are
taken; whoever holds more is refused until as many are free again. So twice the limit may be under
way for a moment.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

from app.access import ANYONE, Caller
from app.environment import MIB
from app.errors import IN_A_SECOND, OverloadedError, SlowBodyError
from app.queueing.fairness import CallerPlaces, Held
from app.queueing.overload import ConcurrencyLimit, PlanSwitch

IMAGES_GAIN = 1 / 32  # of the exponentially weighted mean of images per request


class Admission:
    """Counts the requests under way, and refuses requests beyond the limit.

    Args:
        max_requests: the limit, unless there is overload.
        on_refused: called with the estimated number of images of each refused request.
        limit: the limit under overload; None: ``max_requests`` always.
        switch: says when requests are answered by the fast plan; None: never for lack of places.
        of_all: whether this counts all requests of the Gateway, not only those of one model set.
            Then refusals carry the limit, for HAProxy.
    """

    def __init__(
        self,
        max_requests: int,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[float], None] = lambda _: None,
        limit: ConcurrencyLimit | None = None,
        switch: PlanSwitch | None = None,
        *,
        of_all: bool = True,
    ) -> None:
        self._switch = switch
        self._max_requests, self._on_refused, self._clock = max_requests, on_refused, clock
        self._limit, self.is_of_all = limit, of_all
        self._num_answering = 0  # requests whose bodies have arrived
        self._images_per_request = 1.0  # a recent mean: that of a refused request is unknown
        self.uploads = Uploads()
        self._callers = CallerPlaces()

    @property
    def num_under_way(self) -> int:
        return self._num_answering + self.uploads.num

    def begin(self, caller: Caller = ANYONE) -> None:
        """Count a caller's request from now until :meth:`end`, its body included.

        Raises:
            OverloadedError: the limit is reached, no slow upload can be cancelled instead, and the
                caller holds its share of the places.
        """
        held = self._callers.of(caller, self._clock())
        if self._switch is not None:
            self._switch.arrived(self._clock(), self._num_answering)
        try:
            if self._limit is not None and self._limit.is_on:
                self._check_limit(self._limit, caller, held)
            self._check_places(caller, held)
        except OverloadedError:
            self._note_refusal()
            self._on_refused(self._images_per_request)
            raise
        self._num_answering += 1
        held.num += 1

    def end(self, caller: Caller = ANYONE, *, is_answered: bool) -> None:
        """Stop counting a request; the limit learns its rate from answered requests only."""
        self._num_answering -= 1
        self._callers.give_back(caller)
        if is_answered and self._switch is not None:
            self._switch.answered()
        if is_answered and self._limit is not None and self._limit.crowd:
            self._limit.answered(self._clock(), self._num_answering)

    @property
    def is_nearly_full(self) -> bool:
        """Whether a request should be answered by the fast plan, before others are refused."""
        return self._switch is not None and self._switch.is_fast

    @contextmanager
    def admit(self, caller: Caller = ANYONE) -> Iterator[None]:
        """Count a request during the block; raises as :meth:`begin` does."""
        self.begin(caller)
        is_answered = False
        try:
            yield
            is_answered = True
        finally:
            self.end(caller, is_answered=is_answered)

    def arriving(self, within_s: float) -> "Arriving":
        """Return a context manager of the block in which an admitted request's body arrives."""
        return Arriving(self, within_s)

    def holds(self, num_images: int) -> None:
        """Record how many images an admitted request has, once its body is read."""
        self._images_per_request += (num_images - self._images_per_request) * IMAGES_GAIN
        if self._limit is not None:
            self._limit.images_per_request = self._images_per_request

    def refused_before(self, num: int) -> None:
        """Count ``num`` requests that HAProxy refused itself."""
        self._on_refused(num * self._images_per_request)
        if self._switch is not None:
            self._switch.arrived(self._clock(), self._num_answering, num)
        if self._limit is not None and self._limit.is_on:
            self._limit.arrived(self._clock(), num)
        self._note_refusal(num)

    def _note_refusal(self, num: int = 1) -> None:
        if self._switch is not None:
            self._switch.refused(self._clock(), self._num_answering)
        if self._limit is not None:
            self._limit.refused(self._clock(), self._num_answering, num)

    def _make_room(self) -> None:
        """Cancel slow uploads beyond half of the limit: HAProxy refuses when all places are taken.

        Without that, slow clients could fill the service before a request reaches it.
        """
        while 2 * len(self.uploads.under_way) > self._max_requests:
            if not self.uploads.cut_slowest():
                return

    def _check_limit(self, limit: ConcurrencyLimit, caller: Caller, held: Held) -> None:
        """Refuse a request beyond the present limit under overload.

        Uploads do not count: no core works on them.
        """
        limit.arrived(self._clock())
        if not limit.is_on:
            return
        num, most = self._num_answering, limit.value
        if num < most or self._has_own_place(held, most):
            limit.admitted(self._clock())
            return
        text = f"overload: {num} requests are under way, the limit while more come than it answers"
        most = min(self._max_requests, most + self.uploads.num)
        raise self._refusal(text, caller, held, most)

    def _check_places(self, caller: Caller, held: Held) -> None:
        # An upload is cancelled only for a request that is then admitted.
        num, most = self._num_answering + len(self.uploads.under_way), self._max_requests
        has_place = num < most or self._has_own_place(held, most)
        if not has_place and not self.uploads.cut_slowest():
            text = f"{num} requests are under way, the limit"
            raise self._refusal(text, caller, held, most)
        self._make_room()

    def _has_own_place(self, held: Held, most: int) -> bool:
        """Whether a caller has less than its share of ``most`` places.

        None has while twice the settings' limit are under way.
        """
        own, _ = self._callers.shares_of(held, most)
        return held.num < own < most and self.num_under_way < 2 * self._max_requests

    def _refusal(self, text: str, caller: Caller, held: Held, most: int) -> OverloadedError:
        """Return the refusal of a caller, of whom ``most`` is the limit with all others."""
        own, of_new = self._callers.shares_of(held, most)
        if own < most:
            text += f", {held.num} of them from {caller.name}, whose share is {own}"
        limits = (most, max(own, most - self.num_under_way + held.num), of_new)
        return OverloadedError(f"{text}; {IN_A_SECOND}", *(limits if self.is_of_all else ()))


class Arriving:
    """Limits the time in which the body of an admitted request arrives, in the block.

    During the upload the request does not count as being answered: how long it takes depends on its
    client.

    Raises:
        SlowBodyError: the body took over ``within_s`` seconds, or its upload was cancelled to make
            room for another request.
    """

    __slots__ = ("_admission", "_upload")

    def __init__(self, admission: Admission, within_s: float) -> None:
        self._admission, self._upload = admission, admission.uploads.arriving(within_s)

    async def __aenter__(self) -> None:
        await self._upload.__aenter__()
        self._admission._num_answering -= 1

    async def __aexit__(self, *error: Any) -> None:
        self._admission._num_answering += 1
        await self._upload.__aexit__(*error)


# An upload keeps its place for this time, or for this time per MiB that it announced.
SLOW_AFTER_S = 1.0
SLOW_S_PER_MIB = 0.25


class Upload:
    """An upload under way; an asynchronous context manager around the arrival of its body.

    Times are by the loop's clock. ``num_bytes`` is its announced length; 0 if only the number of
    uploads matters.

    Raises:
        SlowBodyError: the upload took over ``within_s`` seconds, or gave its place to another.
    """

    __slots__ = ("_started", "_uploads", "_within_s", "is_cut", "num_bytes", "slow_from", "timeout")

    def __init__(self, uploads: "Uploads", within_s: float, num_bytes: int) -> None:
        self._uploads, self._within_s, self.num_bytes = uploads, within_s, num_bytes
        self.timeout = asyncio.timeout(within_s if math.isfinite(within_s) else None)
        self._started = asyncio.get_running_loop().time()
        slow_after_s = max(uploads.slow_after_s, num_bytes / MIB * SLOW_S_PER_MIB)
        self.slow_from = self._started + slow_after_s
        self.is_cut = False  # cancelled to make room for another

    @property
    def is_slow(self) -> bool:
        """Whether another request may take its place: it is slow, or its time is over."""
        now = asyncio.get_running_loop().time()
        return self.timeout.expired() or now >= self.slow_from

    async def __aenter__(self) -> Self:
        await self.timeout.__aenter__()
        self._uploads.under_way[self] = None
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._uploads.under_way.pop(self, None)
        try:
            await self.timeout.__aexit__(*error)
        except TimeoutError as late:
            took_s = asyncio.get_running_loop().time() - self._started
            why = _cut_after(took_s) if self.is_cut else _late_after(self._within_s)
            raise SlowBodyError(why) from late


class Uploads:
    """The uploads under way, in the order of arrival."""

    def __init__(self, slow_after_s: float | None = None) -> None:
        self.slow_after_s = SLOW_AFTER_S if slow_after_s is None else slow_after_s
        self.under_way: dict[Upload, None] = {}  # without those that were cancelled

    @property
    def num(self) -> int:
        return len(self.under_way)

    @property
    def num_bytes(self) -> int:
        return sum(upload.num_bytes for upload in self.under_way)

    @property
    def slowest(self) -> "Upload | None":
        """The upload that has been slow for the longest time, or will be slow first."""
        return min(self.under_way, key=lambda upload: upload.slow_from, default=None)

    def arriving(self, within_s: float = math.inf, num_bytes: int = 0) -> Upload:
        """Return an upload, which limits the time of the block in which it arrives."""
        return Upload(self, within_s, num_bytes)

    def cut_slowest(self) -> bool:
        """Cancel the slowest upload, if it is slow, to free its place.

        Otherwise idle connections could hold every place. Returns False if no upload is slow.
        """
        upload = self.slowest
        if upload is None or not upload.is_slow:
            return False
        del self.under_way[upload]
        if not upload.timeout.expired():  # otherwise it is ending already
            upload.is_cut = True
            upload.timeout.reschedule(asyncio.get_running_loop().time())
        return True


def _cut_after(seconds: float) -> str:
    return (
        f"the body had not arrived after {seconds:.1f} s, and other requests needed its place; "
        "try again, with fewer bytes or a faster connection"
    )


def _late_after(seconds: float) -> str:
    return (
        f"the body had not arrived after {seconds:g} s, the request's time limit; send fewer bytes "
        "at a time, or allow more time (request_timeout_s, x-request-timeout-seconds)"
    )


class ByteBudget:
    """Counts the bytes of bodies that have arrived, each until its request is answered.

    Announced bytes (Content-Length) are checked against the budget but not reserved. Otherwise
    twelve clients that announce 20 MB each and send nothing would use up 256 MiB.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.num_held = limit, 0

    def share(self) -> "Share":
        """Return a request's share, a context manager that frees its bytes at the block's end."""
        return Share(self)


class Share:
    """The bytes of a :class:`ByteBudget` that one request holds."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget, self.num_held = budget, 0
        self.num_announced = 0  # by the request; 0: it did not say

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def free(self) -> None:
        """Give the bytes back; from then on the share holds none."""
        self._budget.num_held -= self.num_held
        self.num_held = 0

    def expect(self, num_bytes: int) -> None:
        """Raise :class:`OverloadedError` if ``num_bytes`` more would not fit now."""
        budget, self.num_announced = self._budget, self.num_held + num_bytes
        if budget.num_held + num_bytes > budget.limit:
            raise OverloadedError(
                f"the bodies of all requests hold {budget.num_held} bytes, of at most "
                f"{budget.limit} (max_bytes_in_flight); try again in 1 s"
            )

    def grow(self, num_bytes: int) -> None:
        """Add bytes that have arrived; raises as :meth:`expect` does."""
        budget = self._budget
        if budget.num_held + num_bytes > budget.limit:
            self.expect(num_bytes)  # raises
        budget.num_held += num_bytes
        self.num_held += num_bytes


class UsageReport(NamedTuple):
    """A replica's figures at one moment; counts are since its start."""

    at: float  # s, by the replica's clock
    images_arrived: float  # refused ones included
    images_done: float
    images_waiting: float  # under way
    cpu_ms: float  # of the whole process, without copies for a shadow version
    cores: float  # that the replica can use
    expected_cpu_ms: float  # for an image, before it is measured


FIGURES = UsageReport._fields[1:]  # Serve's controller keeps a series for each


class Usage:
    """Counts a replica's images; all calls must come from its event loop."""

    def __init__(
        self, cores: float, expected_cpu_ms: float, cpu_s: Callable[[], float] = time.process_time
    ) -> None:
        self._cores, self._expected_cpu_ms, self._cpu_s = cores, expected_cpu_ms, cpu_s
        self._num_arrived = self._copies_ms = 0.0
        self._num_done = self._num_waiting = 0

    @property
    def num_under_way(self) -> int:
        return self._num_waiting

    def refused(self, num_images: float = 1) -> None:
        """Count refused images, which are demand too."""
        self._num_arrived += num_images

    @contextmanager
    def under_way(self, num_images: int) -> Iterator[None]:
        """Count images as under way during the block; if it raises, they do not count as done.

        Otherwise images that a later stage refuses would lower the cost per image.
        """
        self.began(num_images)
        is_done = False
        try:
            yield
            is_done = True
        finally:
            self.ended(num_images, done=is_done)

    def began(self, num_images: int) -> None:
        self._num_arrived += num_images
        self._num_waiting += num_images

    def ended(self, num_images: int, *, done: bool) -> None:
        self._num_waiting -= num_images
        if done:
            self._num_done += num_images

    def copied(self, cpu_ms: float) -> None:
        """Exclude a shadow's CPU time from the cost per image: most copies use idle cores."""
        self._copies_ms += cpu_ms

    def figures(self) -> dict[str, float]:
        """Return the figures for Serve's ``record_autoscaling_stats``."""
        values = (
            self._num_arrived,
            self._num_done,
            self._num_waiting,
            self._cpu_s() * 1e3 - self._copies_ms,
            self._cores,
            self._expected_cpu_ms,
        )
        return dict(zip(FIGURES, map(float, values), strict=True))
