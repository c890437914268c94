"""Admission control: refuses what could not be answered in time, before the body is read."""

import math
import time
from collections.abc import Callable
from types import TracebackType

from app.errors import OverloadedError
from app.queueing.concurrency_limit import ConcurrencyLimit
from app.queueing.deadlines import Deadlines
from app.queueing.service_rate import ServiceRate
from app.queueing.uploads import Upload, Uploads

# Fewer than this are let in whatever the pace: they fill a batch or two, and a pace that was
# measured while something hung must not keep them out.
ALWAYS = 16
MAX_RETRY_AFTER_S = 30


class Admission:
    """Counts the requests under way, and refuses those that could not be answered in time.

    ``limit`` says how many there may be under overload; None: ``max_requests`` always. A request
    that is refused because it would take longer than ``usual_timeout_s`` is a sign of overload too.
    """

    def __init__(
        self,
        max_requests: int,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[int], None] = lambda _: None,
        limit: ConcurrencyLimit | None = None,
        usual_timeout_s: float = math.inf,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._max_requests, self._on_refused, self._clock = max_requests, on_refused, clock
        self._limit, self._usual_timeout_s = limit, usual_timeout_s
        self._service_rate = ServiceRate(clock)
        self.uploads = Uploads(deadlines)

    @property
    def num_under_way(self) -> int:
        """How many requests are under way."""
        return self._service_rate.num_present + self.uploads.num

    def admit(self, timeout_s: float = math.inf) -> "Admitted":
        """Count a request while it is under way, its body included; ``timeout_s`` is its time.

        Returns:
            A context manager; to enter it is to be admitted.

        Raises:
            OverloadedError: as many as the limit are under way and none of them is a slow upload,
                whose place could be taken, or those that are will take longer than ``timeout_s``,
                or more come than are answered, and enough are under way.

        """
        return Admitted(self, timeout_s)

    def begin(self, timeout_s: float) -> None:
        """Admit a request, which :meth:`end` ends; see :meth:`admit`."""
        try:
            self._check(timeout_s)
        except OverloadedError:
            self._on_refused(1)
            raise
        self._service_rate.arrived()

    def end(self, *, done: bool) -> None:
        """End a request that :meth:`begin` admitted; ``done``: it was answered."""
        if not done:
            self._service_rate.abandoned()
            return
        self._service_rate.done()
        if self._limit is not None and self._limit.is_watching:
            self._limit.answered(self._clock(), self._service_rate.num_present)

    def arriving(self, within_s: float) -> "Arriving":
        """Bound the time in which the body of a request that was let in arrives.

        Meanwhile it is not in the pace: what a client is slow at makes nobody else wait.

        Returns:
            A context manager around the reading of the body.

        Raises:
            SlowBodyError: it is not there after ``within_s`` seconds, or was cut for another.

        """
        return Arriving(self._service_rate, self.uploads.arriving(within_s))

    def holds(self, num_images: int) -> None:
        """Note how many images a request that was let in turned out to have."""
        if self._limit is not None:
            self._limit.holds(num_images)

    def refused_before(self, num: int) -> None:
        """Count ``num`` requests that HAProxy refused before they came here."""
        self._on_refused(num)
        if self._limit is not None and self._limit.is_on:
            self._limit.arrived(self._clock(), num)
        self._note_refusal(num)

    def _note_refusal(self, num: int = 1) -> None:
        if self._limit is not None:
            self._limit.refused(self._clock(), self._service_rate.num_present, num)

    def _make_room(self) -> None:
        """Leave slow uploads half of the places: HAProxy refuses by itself when all are taken."""
        while 2 * self.uploads.num > self._max_requests:
            if not self.uploads.cut_slowest():
                return

    def _check(self, timeout_s: float) -> None:
        # Who has just begun to read is soon among those that are worked on.
        num = self._service_rate.num_present + self.uploads.num_fresh
        wait_s = self._service_rate.wait_s(num)
        if num >= ALWAYS and wait_s > timeout_s:
            if wait_s > self._usual_timeout_s:
                self._note_refusal()
            told = f"{num} requests are under way and take {wait_s:.1f} s, more than the "
            raise OverloadedError(*_refusal(f"{told}{timeout_s:.3g} s of this one", wait_s))
        self._check_limit(wait_s)
        # Last: an upload is cut only for a request that is then let in.
        if self.num_under_way >= self._max_requests and not self.uploads.cut_slowest():
            self._note_refusal()
            told = f"{self.num_under_way} requests are under way, the limit"
            raise OverloadedError(*_refusal(told, wait_s))
        self._make_room()

    def _check_limit(self, wait_s: float) -> None:
        """Refuse what comes beyond the limit of the moment.

        Uploads are not in it: how long they take is the clients' affair, and no core works on them.
        """
        if self._limit is None or not self._limit.is_on:
            return
        self._limit.arrived(self._clock())
        if not self._limit.is_on:
            return
        num, most = self._service_rate.num_present, self._limit.value
        if num < most:
            self._limit.admitted(self._clock())
            return
        self._note_refusal()
        told = f"more come than can be answered, and {num} requests are under way, the limit then"
        of_all = min(self._max_requests, most + self.uploads.num)
        raise OverloadedError(*_refusal(told, wait_s), of_all)


class Admitted:
    """The block of :meth:`Admission.admit`."""

    __slots__ = ("_admission", "_timeout_s")

    def __init__(self, admission: Admission, timeout_s: float) -> None:
        self._admission, self._timeout_s = admission, timeout_s

    def __enter__(self) -> None:
        self._admission.begin(self._timeout_s)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._admission.end(done=kind is None)


class Arriving:
    """The block of :meth:`Admission.arriving`."""

    __slots__ = ("_service_rate", "_upload")

    def __init__(self, service_rate: ServiceRate, upload: Upload) -> None:
        self._service_rate, self._upload = service_rate, upload

    def __enter__(self) -> None:
        self._upload.__enter__()
        self._service_rate.abandoned()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._service_rate.arrived()
        self._upload.__exit__(kind, error, trace)


def _refusal(reason: str, wait_s: float) -> tuple[str, int]:
    """Return the message, and after how many seconds half of what is under way will be done."""
    after_s = min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s / 2)))
    return f"{reason}; try again in {after_s} s", after_s
