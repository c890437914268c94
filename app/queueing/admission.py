"""Admission control: refuses requests beyond the limits, before their bodies are read."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from app.errors import IN_A_SECOND, OverloadedError
from app.queueing.concurrency_limit import ConcurrencyLimit
from app.queueing.uploads import Uploads

IMAGES_GAIN = 1 / 32  # of the exponentially weighted mean of images per request


class Admission:
    """Counts the requests under way, and refuses requests beyond the limit.

    Args:
        max_requests: the limit, unless there is overload.
        clock: returns seconds.
        on_refused: called with the estimated number of images of each refused request.
        limit: the limit under overload; None: ``max_requests`` always.
        of_all: whether this counts all requests of the Gateway, not only those of one model set.
            Then refusals carry the limit, for HAProxy.

    """

    def __init__(
        self,
        max_requests: int,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[float], None] = lambda _: None,
        limit: ConcurrencyLimit | None = None,
        *,
        of_all: bool = True,
    ) -> None:
        self._max_requests, self._on_refused, self._clock = max_requests, on_refused, clock
        self._limit, self.is_of_all = limit, of_all
        self._num_answering = 0  # requests whose bodies have arrived
        self._images_per_request = 1.0  # a recent mean: that of a refused request is unknown
        self.uploads = Uploads()

    @property
    def num_under_way(self) -> int:
        return self._num_answering + self.uploads.num

    def begin(self) -> None:
        """Count a request from now until :meth:`end`, its body included.

        Raises:
            OverloadedError: the limit is reached, and no slow upload can be cancelled instead.

        """
        try:
            if self._limit is not None and self._limit.is_on:
                self._check_limit(self._limit)
            self._check_places()
        except OverloadedError:
            self._note_refusal()
            self._on_refused(self._images_per_request)
            raise
        self._num_answering += 1

    def end(self, *, is_answered: bool) -> None:
        """Count a request no more; one that was not answered says nothing of what is possible."""
        self._num_answering -= 1
        if is_answered and self._limit is not None and self._limit.crowd:
            self._limit.answered(self._clock(), self._num_answering)

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request during the block; raises as :meth:`begin` does."""
        self.begin()
        is_answered = False
        try:
            yield
            is_answered = True
        finally:
            self.end(is_answered=is_answered)

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
        if self._limit is not None and self._limit.is_on:
            self._limit.arrived(self._clock(), num)
        self._note_refusal(num)

    def _note_refusal(self, num: int = 1) -> None:
        if self._limit is not None:
            self._limit.refused(self._clock(), self._num_answering, num)

    def _make_room(self) -> None:
        """Cancel slow uploads beyond half of the limit: HAProxy refuses when all places are taken.

        Without that, slow clients could fill the service before a request reaches it.
        """
        while 2 * len(self.uploads.under_way) > self._max_requests:
            if not self.uploads.cut_slowest():
                return

    def _check_limit(self, limit: ConcurrencyLimit) -> None:
        """Refuse a request beyond the present limit under overload.

        Uploads do not count: no core works on them.
        """
        limit.arrived(self._clock())
        if not limit.is_on:
            return
        num, most = self._num_answering, limit.value
        if num < most:
            limit.admitted(self._clock())
            return
        text = f"overload: {num} requests are under way, the limit while more come than it answers"
        of_all = (min(self._max_requests, most + self.uploads.num),) if self.is_of_all else ()
        raise OverloadedError(f"{text}; {IN_A_SECOND}", *of_all)

    def _check_places(self) -> None:
        # An upload is cancelled only for a request that is then admitted.
        num_under_way = self._num_answering + len(self.uploads.under_way)
        if num_under_way >= self._max_requests and not self.uploads.cut_slowest():
            text = f"{num_under_way} requests are under way, the limit"
            raise OverloadedError(f"{text}; {IN_A_SECOND}")
        self._make_room()


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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._admission._num_answering += 1
        await self._upload.__aexit__(kind, error, trace)
