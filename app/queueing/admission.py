"""Admission control: refuses requests beyond the limits, before their bodies are read."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from app.errors import IN_A_SECOND, OverloadedError
from app.queueing.concurrency_limit import ConcurrencyLimit
from app.queueing.uploads import Uploads

IMAGES_GAIN = 1 / 32  # of an exponentially weighted mean


class Admission:
    """Counts the requests under way, and refuses those for which there is no place.

    ``limit`` says how many there may be under overload; None: ``max_requests`` always.
    ``on_refused`` is told how many images were refused, as far as anybody can know.
    """

    def __init__(
        self,
        max_requests: int,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[float], None] = lambda _: None,
        limit: ConcurrencyLimit | None = None,
    ) -> None:
        self._max_requests, self._on_refused, self._clock = max_requests, on_refused, clock
        self._limit = limit
        self._num_answering = 0  # whose bodies have arrived
        self._images_per_request = 1.0  # of those of late: nobody knows what a refused one has
        self.uploads = Uploads()

    @property
    def num_under_way(self) -> int:
        return self._num_answering + self.uploads.num

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request while it is under way, its body included.

        Raises:
            OverloadedError: as many as the limit are under way, and none of them is a slow upload,
                whose place could be taken.

        """
        self.begin()
        is_answered = False
        try:
            yield
            is_answered = True
        finally:
            self._num_answering -= 1
            if is_answered and self._limit is not None and self._limit.crowd:
                self._limit.answered(self._clock(), self._num_answering)

    def begin(self) -> None:
        """Admit a request, or raise; see :meth:`admit`."""
        try:
            self._check_limit()
            self._check_places()
        except OverloadedError:
            self._note_refusal()
            self._on_refused(self._images_per_request)
            raise
        self._num_answering += 1

    @asynccontextmanager
    async def arriving(self, within_s: float) -> AsyncIterator[None]:
        """Bound the time in which the body of a request that was let in arrives, in the block.

        Meanwhile it takes no place of those that are answered: how long an upload takes is its
        client's affair.

        Raises:
            SlowBodyError: it is not there after ``within_s`` seconds, or was cut for another.

        """
        async with self.uploads.arriving(within_s):
            self._num_answering -= 1
            try:
                yield
            finally:
                self._num_answering += 1

    def holds(self, num_images: int) -> None:
        """Note how many images a request that was let in turned out to have."""
        self._images_per_request += (num_images - self._images_per_request) * IMAGES_GAIN
        if self._limit is not None:
            self._limit.images_per_request = self._images_per_request

    def refused_before(self, num: int) -> None:
        """Count ``num`` requests that HAProxy refused before they came here."""
        self._on_refused(num * self._images_per_request)
        if self._limit is not None and self._limit.is_on:
            self._limit.arrived(self._clock(), num)
        self._note_refusal(num)

    def _note_refusal(self, num: int = 1) -> None:
        if self._limit is not None:
            self._limit.refused(self._clock(), self._num_answering, num)

    def _make_room(self) -> None:
        """Leave slow uploads half of the places: HAProxy refuses by itself when all are taken."""
        while 2 * self.uploads.num > self._max_requests:
            if not self.uploads.cut_slowest():
                return

    def _check_limit(self) -> None:
        """Refuse what comes beyond the limit of the moment.

        Uploads are not in it: no core works on them.
        """
        if self._limit is None or not self._limit.is_on:
            return
        self._limit.arrived(self._clock())
        if not self._limit.is_on:
            return
        num, most = self._num_answering, self._limit.value
        if num < most:
            self._limit.admitted(self._clock())
            return
        text = f"more come than can be answered, and {num} requests are under way, the limit then"
        of_all = min(self._max_requests, most + self.uploads.num)
        raise OverloadedError(f"{text}; {IN_A_SECOND}", of_all)

    def _check_places(self) -> None:
        # An upload is cut only for a request that is then let in.
        if self.num_under_way >= self._max_requests and not self.uploads.cut_slowest():
            text = f"{self.num_under_way} requests are under way, the limit"
            raise OverloadedError(f"{text}; {IN_A_SECOND}")
        self._make_room()
