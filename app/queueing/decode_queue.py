"""The queue of files to decode: interactive files first, and heavy files never on every thread.

A thread reads a file's header when it is the file's turn; only then its cost is known. A light file
is decoded at once. A heavy file (a large PNG takes half a second, a photo 2 ms) is queued again
with other heavy files: they may use all threads but one, and the sum of their pixels is limited.
So large pictures wait for each other, and photos pass them. Deadlines are checked at each turn.

A request's only small photo is decoded on the event loop instead (:class:`LoopTurn`).
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from app.errors import IN_A_SECOND, MORE_TIME, DeadlineError, OverloadedError
from app.queueing.fairness import CALLER, FAR_S, CallerShares, CoreShare
from app.queueing.scheduler import BULK_EVERY, Lane, PriorityQueue
from models.errors import TandemError, TooManyPixelsError

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Heavy(Generic[R]):
    """The rest of a file's decoding, returned for a heavy file; ``run`` does it."""

    pixels: int
    run: Callable[[], R]


@dataclass(slots=True)
class FilesToDecode:
    """The files of one request, which share a deadline and a lane."""

    lane: Lane
    expires: float  # by the queue's clock
    heavy_pixels: int = field(default=0, init=False)  # of the heavy files seen so far


@dataclass(slots=True, eq=False)
class _Job(Generic[R]):
    call: FilesToDecode
    run: Callable[[], R | Heavy[R]]
    future: asyncio.Future[R]
    share: CoreShare
    due: float  # for the order among its caller's files
    pixels: int = 0  # of a heavy file

    def is_gone(self) -> bool:
        """Whether the file is not needed: its caller has gone, or has an answer."""
        return self.future.done()


# A job after its turn. It has neither result nor error if its caller has gone.
_Ended = tuple[_Job[R], R | None, BaseException | None]


class DecodeQueue(Generic[R]):
    """Decodes files on ``num_threads`` threads; heavy files have ``max_heavy_pixels`` in sum.

    A free thread takes the next file without waiting for the event loop. All methods are called on
    the loop, and ``run`` is called on a thread.
    """

    def __init__(
        self, num_threads: int, max_heavy_pixels: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._executor = ThreadPoolExecutor(num_threads, "decode")
        self._num_threads = num_threads
        self._num_open = 0  # files that have not ended; used on the loop only
        # Called on the loop after a file has ended and its future is done.
        self.on_end: Callable[[], None] = lambda: None
        self._clock, self._max_heavy_pixels = clock, max_heavy_pixels
        self._lock = threading.Lock()  # guards the attributes below
        self._max_heavy = self._num_heavy_free = max(1, num_threads - 1)
        self._callers = CallerShares()
        self._light = PriorityQueue[_Job[R]](self._callers)
        self._heavy: deque[_Job[R]] = deque()
        self._since_heavy = 0  # light files taken since the last heavy file
        self._since_copy = 0  # files taken since the last of the shadow lane
        self._heavy_pixels = 0  # of heavy files that are decoded

    @property
    def num_coming(self) -> int:
        """Images that wait or are decoded, without heavy ones: batches should not wait for them."""
        return self._num_open - len(self._heavy) - (self._max_heavy - self._num_heavy_free)

    @property
    def num_busy(self) -> int:
        """How many cores decoding keeps busy, without heavy files."""
        return min(self.num_coming, self._num_threads)

    def submit(self, call: FilesToDecode, run: Callable[[], R | Heavy[R]]) -> asyncio.Future[R]:
        """Queue a file; ``run`` decodes it, or returns a :class:`Heavy`.

        The future raises:
            DeadlineError: the request's deadline passed before the file's turn.
            OverloadedError: the file is heavy, and too many pixels wait or are decoded.
            TooManyPixelsError: the request's heavy files alone exceed ``max_heavy_pixels``.
        """
        now, future = self._clock(), asyncio.get_running_loop().create_future()
        with self._lock:
            share = self._callers.asks(CALLER.get(), now)
            job = _Job(call, run, future, share, min(call.expires, now + FAR_S))
            self._light.lane(call.lane).add([job])
        self._num_open += 1
        self._call_thread()
        return job.future

    def _call_thread(self) -> None:
        """Let a thread run one more job; a free thread takes the next job by itself."""
        turn = asyncio.get_running_loop().run_in_executor(self._executor, self._run_next)
        turn.add_done_callback(self._had_turn)

    def _run_next(self) -> _Ended[R] | None:
        """Run the next job, on a thread; None if only heavy jobs wait and enough of them run."""
        while True:
            with self._lock:
                job = self._next()
            if job is None:
                return None
            result, error = None, None
            try:
                result = self._run(job)
            except BaseException as raised:
                error = raised
            with self._lock:
                if job.pixels:
                    self._num_heavy_free += 1
                    self._heavy_pixels -= job.pixels
                if not isinstance(result, Heavy):
                    return job, result, error
                if (refusal := self._queue_heavy(job, result)) is not None:
                    return job, None, refusal

    def _run(self, job: _Job[R]) -> R | Heavy[R] | None:
        if job.is_gone():
            return None
        if self._clock() >= job.call.expires:
            late = f"the deadline passed before the image was decoded; {MORE_TIME}"
            raise DeadlineError(late)
        return job.run()

    def _next(self) -> _Job[R] | None:
        """Take the next job: every ``BULK_EVERY``-th is heavy, if any wait and may run."""
        may_be_heavy = self._heavy and self._num_heavy_free
        if may_be_heavy and (not self._light or self._since_heavy >= BULK_EVERY - 1):
            self._since_heavy = 0
            self._num_heavy_free -= 1
            heavy = self._heavy.popleft()
            self._heavy_pixels += heavy.pixels
            return heavy
        self._since_copy += 1
        # A copy that has begun may have a turn for which its version's share of compute was spent.
        if self._light.shadow and (not self._light or self._since_copy >= BULK_EVERY):
            self._since_copy = 0
            return self._light.shadow.popleft()
        if not self._light:
            return None
        self._since_heavy += 1
        return self._light.pop(1.0)

    def _queue_heavy(self, job: _Job[R], heavy: Heavy[R]) -> TandemError | None:
        """Queue a job again as heavy; return an error if there is no room for it."""
        most = self._max_heavy_pixels
        if job.call.heavy_pixels + heavy.pixels > most:
            return TooManyPixelsError(
                f"the large files of this request have over {most:,} pixels to decode, the limit "
                "of all requests together: send fewer files at a time, smaller files, or JPEG"
            )
        waiting = sum(other.pixels for other in self._heavy if not other.is_gone())
        if (num_pixels := self._heavy_pixels + waiting) + heavy.pixels > most:
            return OverloadedError(
                f"{num_pixels:,} pixels of large pictures are being decoded, and "
                f"{heavy.pixels:,} more exceed the limit of {most:,}; {IN_A_SECOND}"
            )
        job.call.heavy_pixels += heavy.pixels
        self._heavy.append(_Job(job.call, heavy.run, job.future, job.share, job.due, heavy.pixels))
        return None

    def _had_turn(self, turn: asyncio.Future[_Ended[R] | None]) -> None:
        if turn.cancelled() or (ended := turn.result()) is None:
            return
        job, result, error = ended
        self._num_open -= 1
        # Threads may have passed over heavy files while enough of them ran. Whether some wait is no
        # matter: the thread may have taken one already, in the turn of a file that waits now.
        if job.pixels:
            self._call_thread()
        if not job.is_gone():
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(cast(R, result))
        self.on_end()  # after the result is set, so that its caller goes on first


class LoopTurn(Generic[R]):
    """Collects the files that arrive in one turn of the loop, and decodes them in the next.

    So each step runs several times in a row: reading, decoding, queueing. Its code and data stay in
    the processor's caches. And the images of a turn reach the members together. A turn has at most
    ``most`` files, since other work of the loop waits for them.
    """

    def __init__(self, decode: Callable[[bytes], R], most: int) -> None:
        self._decode, self._most = decode, most
        self._waiting: list[tuple[bytes, asyncio.Future[R]]] = []
        self.on_end: Callable[[], None] = lambda: None  # as :class:`DecodeQueue`'s

    @property
    def num_waiting(self) -> int:
        """How many files the next turn decodes."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        return len(self._waiting) < self._most

    def submit(self, data: bytes) -> asyncio.Future[R]:
        """Return the future of ``decode``'s result; cancelling it leaves the file out."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._decode_all)
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((data, future))
        return future

    def _decode_all(self) -> None:
        files, self._waiting = self._waiting, []
        for data, future in files:
            if future.done():  # its caller has gone
                continue
            try:
                future.set_result(self._decode(data))
            except Exception as error:
                future.set_exception(error)
        asyncio.get_running_loop().call_soon(self.on_end)
