"""The queue of files to decode: interactive ones first, and heavy ones never on every thread.

A file's cost is known only once its header has been read, which happens on a thread, when its turn
has come. A light one is then decoded at once. A heavy one (a large PNG takes half a second where a
photo takes two milliseconds) waits again, among its like: at most all threads but one decode heavy
files, and their pixels together are limited. So whoever sends large pictures waits for others who
do, and photos pass. Deadlines are looked at whenever a file has its turn.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar, cast

from app.errors import IN_A_SECOND, MORE_TIME, DeadlineError, OverloadedError
from app.queueing.priority import BULK_EVERY, Lane, PriorityQueue
from app.queueing.threads import WorkerThreads
from models.errors import TooManyPixelsError

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Heavy(Generic[R]):
    """Work that has turned out to be heavy; ``run`` is called when such work has its turn."""

    pixels: int
    run: Callable[[], R]


@dataclass(slots=True)
class DecodeCall:
    """The files of one request."""

    lane: Lane
    expires: float  # by the queue's clock
    heavy_pixels: int = field(default=0, init=False)  # of its files so far


@dataclass(slots=True, eq=False)
class _Job(Generic[R]):
    call: DecodeCall
    run: Callable[[], R | Heavy[R]]
    future: asyncio.Future[R]
    pixels: int = 0  # of a heavy file

    def is_gone(self) -> bool:
        """Whether the caller went away, or was answered."""
        return self.future.done()


class DecodeQueue(Generic[R]):
    """Feeds ``num_threads`` threads; ``max_heavy_pixels`` of heavy files wait or are decoded.

    All methods are called on the event loop, ``run`` on a thread.
    """

    def __init__(
        self,
        num_threads: int,
        max_heavy_pixels: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threads: WorkerThreads[R | Heavy[R]] = WorkerThreads(num_threads, "decode")
        self._clock, self._max_heavy_pixels = clock, max_heavy_pixels
        self._num_free = num_threads
        self._num_heavy_free = max(1, num_threads - 1)
        self._light: PriorityQueue[_Job[R]] = PriorityQueue()
        self._heavy: deque[_Job[R]] = deque()
        self._since_heavy = 0  # light files begun since a heavy one was
        self._heavy_pixels = 0  # waiting or being decoded

    def submit(self, call: DecodeCall, run: Callable[[], R | Heavy[R]]) -> asyncio.Future[R]:
        """Queue a file; ``run`` decodes it, or returns what is :class:`Heavy`.

        The future raises:
            DeadlineError: the call's time was over before the file had its turn.
            OverloadedError: it is heavy, and too many pixels are under way.
            TooManyPixelsError: the call's own heavy files have more pixels than may ever be.

        """
        job = _Job(call, run, asyncio.get_running_loop().create_future())
        self._light.extend([job], call.lane)
        self._start_all()
        return job.future

    def _start_all(self) -> None:
        while self._num_free and (job := self._next()) is not None:
            if job.is_gone():
                self._release(job)
            elif self._clock() >= job.call.expires:
                self._release(job)
                late = f"the deadline passed before the image was decoded; {MORE_TIME}"
                job.future.set_exception(DeadlineError(late))
            else:
                self._start(job)

    def _next(self) -> _Job[R] | None:
        """Take the next job: of every ``BULK_EVERY`` one is heavy if any wait and may run."""
        may_be_heavy = self._heavy and self._num_heavy_free
        if may_be_heavy and (not len(self._light) or self._since_heavy >= BULK_EVERY - 1):
            self._since_heavy = 0
            return self._heavy.popleft()
        if not len(self._light):
            return None
        self._since_heavy += 1
        return self._light.pop()

    def _start(self, job: _Job[R]) -> None:
        self._num_free -= 1
        self._num_heavy_free -= job.pixels > 0
        self._threads.start(job.run, partial(self._ended, job))

    def _ended(
        self, job: _Job[R], result: R | Heavy[R] | None, error: BaseException | None
    ) -> None:
        self._num_free += 1
        self._num_heavy_free += job.pixels > 0
        self._release(job)
        if job.is_gone():
            pass
        elif error is not None:
            job.future.set_exception(error)
        elif isinstance(result, Heavy):
            self._queue_heavy(job, result)
        else:
            job.future.set_result(cast(R, result))
        self._start_all()

    def _queue_heavy(self, job: _Job[R], heavy: Heavy[R]) -> None:
        most = self._max_heavy_pixels
        if job.call.heavy_pixels + heavy.pixels > most:
            job.future.set_exception(
                TooManyPixelsError(
                    f"the large files of this request have over {most:,} pixels to decode, the "
                    "limit of all together: send fewer at a time, smaller ones, or JPEG"
                )
            )
        elif self._heavy_pixels + heavy.pixels > most:
            job.future.set_exception(
                OverloadedError(
                    f"{self._heavy_pixels:,} pixels of large pictures are being decoded, "
                    f"{heavy.pixels:,} more do not fit into {most:,}; {IN_A_SECOND}"
                )
            )
        else:
            job.call.heavy_pixels += heavy.pixels
            self._heavy_pixels += heavy.pixels
            self._heavy.append(_Job(job.call, heavy.run, job.future, heavy.pixels))

    def _release(self, job: _Job[R]) -> None:
        self._heavy_pixels -= job.pixels
