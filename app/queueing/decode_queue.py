"""The queue of files to decode: interactive ones first, and heavy ones never on every thread.

A file's cost is known only once its header has been read, which happens on a thread, when its turn
has come. A light one is then decoded at once. A heavy one (a large PNG takes half a second where a
photo takes two milliseconds) waits again, among its like: at most all threads but one decode heavy
files, and their pixels together are limited. So whoever sends large pictures waits for others who
do, and photos pass. Deadlines are looked at whenever a file has its turn.

A lone small photo is decoded on the event loop instead, those of one turn of it together.
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
from app.queueing.priority import BULK_EVERY, Lane, PriorityQueue
from models.errors import TandemError, TooManyPixelsError

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Heavy(Generic[R]):
    """Work that has turned out to be heavy; ``run`` is called when such work has its turn."""

    pixels: int
    run: Callable[[], R]


@dataclass(slots=True)
class FilesToDecode:
    """The files of one request."""

    lane: Lane
    expires: float  # by the queue's clock
    heavy_pixels: int = field(default=0, init=False)  # of its files so far


@dataclass(slots=True, eq=False)
class _Job(Generic[R]):
    call: FilesToDecode
    run: Callable[[], R | Heavy[R]]
    future: asyncio.Future[R]
    pixels: int = 0  # of a heavy file

    def is_gone(self) -> bool:
        """Whether the caller went away, or was answered."""
        return self.future.done()


# A job that has had its turn; neither result nor error: its caller went away.
_Ended = tuple[_Job[R], R | None, BaseException | None]


class DecodeQueue(Generic[R]):
    """Feeds ``num_threads`` threads; ``max_heavy_pixels`` of heavy files wait or are decoded.

    A thread that is free takes the next file by itself and does not wait for the event loop. All
    methods are called on the loop, ``run`` on a thread.
    """

    def __init__(
        self,
        num_threads: int,
        max_heavy_pixels: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = ThreadPoolExecutor(num_threads, "decode")
        self._num_threads = num_threads
        self._num_open = 0  # files that have not ended; of the loop
        # Called on the loop whenever a file has ended, and its future is done.
        self.on_end: Callable[[], None] = lambda: None
        self._clock, self._max_heavy_pixels = clock, max_heavy_pixels
        self._lock = threading.Lock()  # of all that follows
        self._max_heavy = self._num_heavy_free = max(1, num_threads - 1)
        self._light: PriorityQueue[_Job[R]] = PriorityQueue()
        self._heavy: deque[_Job[R]] = deque()
        self._since_heavy = 0  # light files begun since a heavy one was
        self._heavy_pixels = 0  # waiting or being decoded

    @property
    def num_coming(self) -> int:
        """Images that wait or are decoded, but for the heavy ones: nobody should wait for those."""
        return self._num_open - len(self._heavy) - (self._max_heavy - self._num_heavy_free)

    @property
    def num_busy(self) -> int:
        """How many cores decoding keeps busy, but for the heavy files."""
        return min(self.num_coming, self._num_threads)

    def submit(self, call: FilesToDecode, run: Callable[[], R | Heavy[R]]) -> asyncio.Future[R]:
        """Queue a file; ``run`` decodes it, or returns what is :class:`Heavy`.

        The future raises:
            DeadlineError: the call's time was over before the file had its turn.
            OverloadedError: it is heavy, and too many pixels are under way.
            TooManyPixelsError: the call's own heavy files have more pixels than may ever be.

        """
        job = _Job(call, run, asyncio.get_running_loop().create_future())
        with self._lock:
            self._light.extend([job], call.lane)
        self._num_open += 1
        self._call_thread()
        return job.future

    def _call_thread(self) -> None:
        """Let a thread run one job more: the one whose turn it is when the thread is free."""
        turn = asyncio.get_running_loop().run_in_executor(self._executor, self._run_next)
        turn.add_done_callback(self._had_turn)

    def _run_next(self) -> _Ended[R] | None:
        """Run the next job, on a thread; None if all that wait are heavy and enough of them run."""
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
        """Take the next job: of every ``BULK_EVERY`` one is heavy if any wait and may run."""
        may_be_heavy = self._heavy and self._num_heavy_free
        if may_be_heavy and (not len(self._light) or self._since_heavy >= BULK_EVERY - 1):
            self._since_heavy = 0
            self._num_heavy_free -= 1
            return self._heavy.popleft()
        if not len(self._light):
            return None
        self._since_heavy += 1
        return self._light.pop()

    def _queue_heavy(self, job: _Job[R], heavy: Heavy[R]) -> TandemError | None:
        """Let a job that has turned out to be heavy wait again; or return why it may not."""
        most = self._max_heavy_pixels
        if job.call.heavy_pixels + heavy.pixels > most:
            return TooManyPixelsError(
                f"the large files of this request have over {most:,} pixels to decode, the "
                "limit of all together: send fewer at a time, smaller ones, or JPEG"
            )
        if self._heavy_pixels + heavy.pixels > most:
            return OverloadedError(
                f"{self._heavy_pixels:,} pixels of large pictures are being decoded, "
                f"{heavy.pixels:,} more do not fit into {most:,}; {IN_A_SECOND}"
            )
        job.call.heavy_pixels += heavy.pixels
        self._heavy_pixels += heavy.pixels
        self._heavy.append(_Job(job.call, heavy.run, job.future, heavy.pixels))
        return None

    def _had_turn(self, turn: asyncio.Future[_Ended[R] | None]) -> None:
        if turn.cancelled() or (ended := turn.result()) is None:
            return
        job, result, error = ended
        self._num_open -= 1
        if job.pixels and self._heavy:  # whose threads may have found enough heavy ones running
            self._call_thread()
        if not job.is_gone():
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(cast(R, result))
        self.on_end()  # after the result: who waits for it goes on first


class LoopTurn(Generic[R]):
    """Gathers what comes in one turn of the loop, and decodes it at the beginning of the next.

    So the code before decoding, decoding itself, and the code after it each run several times in a
    row, and find in the processor's caches what the last run has left there. And the images of a
    turn reach the members together.

    Args:
        decode: gives what becomes of a file; called on the loop.
        most: files of one turn. What else the loop has to do waits for them.

    """

    def __init__(self, decode: Callable[[bytes], R], most: int) -> None:
        self._decode, self._most = decode, most
        self._waiting: list[tuple[bytes, asyncio.Future[R]]] = []
        self.on_end: Callable[[], None] = lambda: None  # as the queue's

    @property
    def num_waiting(self) -> int:
        """How many files are decoded in the next turn."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether the next turn takes one more."""
        return len(self._waiting) < self._most

    def submit(self, data: bytes) -> asyncio.Future[R]:
        """Return the future of what ``decode`` gives or raises; cancelled, it is not called."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._decode_all)
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((data, future))
        return future

    def _decode_all(self) -> None:
        files, self._waiting = self._waiting, []
        for data, future in files:
            if future.done():  # its caller went away
                continue
            try:
                future.set_result(self._decode(data))
            except Exception as error:
                future.set_exception(error)
        asyncio.get_running_loop().call_soon(self.on_end)
