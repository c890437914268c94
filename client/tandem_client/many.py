"""Any number of images, a few requests at a time; results in order or as they arrive."""

import asyncio
import concurrent.futures
import ssl
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, replace

from tandem_client.answers import Result
from tandem_client.async_calls import AsyncCalls
from tandem_client.images import Image
from tandem_client.loop_thread import LoopThread, wait_for_any
from tandem_client.options import CallOptions, Options

# Started images and unconsumed results for each request under way: later images need not wait for a
# slow one, and memory stays bounded.
AHEAD = 4


@dataclass(frozen=True)
class Stream:
    """The way images are sent: ``concurrency`` at a time, each with ``options``."""

    options: CallOptions
    concurrency: int
    ordered: bool
    raise_errors: bool

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}: give 1 or more")

    @property
    def window(self) -> int:
        """The limit of images that are started and not yet returned to the caller."""
        return AHEAD * self.concurrency

    def blocking(
        self, images: Iterable[Image], options: Options, context: ssl.SSLContext
    ) -> Iterator[Result]:
        """Yield results; requests run on another thread, ``images`` is iterated on this one."""
        connections = replace(options, max_connections=self.concurrency)
        calls, slots = AsyncCalls(connections, context), asyncio.Semaphore(self.concurrency)
        with LoopThread(calls) as thread:
            begun: deque[concurrent.futures.Future[Result]] = deque()
            for index, image in enumerate(images):
                begun.append(thread.submit(self._result, calls, slots, index, image))
                while len(begun) >= self.window or (begun and self._first_done(begun)):
                    yield self._taken(self._next(begun).result())
            while begun:
                yield self._taken(self._next(begun).result())

    async def on_loop(self, images: Iterable[Image], calls: AsyncCalls) -> AsyncIterator[Result]:
        """Yield results; the requests are tasks of the running loop."""
        slots = asyncio.Semaphore(self.concurrency)
        begun: deque[asyncio.Task[Result]] = deque()
        try:
            for index, image in enumerate(images):
                begun.append(asyncio.create_task(self._result(calls, slots, index, image)))
                while len(begun) >= self.window:
                    yield self._taken(await self._next_task(begun))
            while begun:
                yield self._taken(await self._next_task(begun))
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)

    async def _result(
        self, calls: AsyncCalls, slots: asyncio.Semaphore, index: int, image: Image
    ) -> Result:
        """Return an image's result, once a place is free."""
        async with slots:
            return await calls.result(index, image, self.options)

    def _taken(self, result: Result) -> Result:
        if self.raise_errors and result.error is not None:
            raise result.error
        return result

    def _first_done(self, begun: "deque[concurrent.futures.Future[Result]]") -> bool:
        return begun[0].done() if self.ordered else any(future.done() for future in begun)

    def _next(
        self, begun: "deque[concurrent.futures.Future[Result]]"
    ) -> "concurrent.futures.Future[Result]":
        """Remove and return the future of the next result, once it is done."""
        waited = [begun[0]] if self.ordered else list(begun)
        wait_for_any(waited)
        done = next(future for future in waited if future.done())
        begun.remove(done)
        return done

    async def _next_task(self, begun: "deque[asyncio.Task[Result]]") -> Result:
        """Wait for the next result; its task stays in ``begun`` to be cancelled until then."""
        if self.ordered:
            done = begun[0]
            await asyncio.wait([done])
        else:
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            done = next(task for task in begun if task.done())
        begun.remove(done)
        return done.result()
