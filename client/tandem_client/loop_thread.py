"""An event loop on a thread of its own, for blocking code that wants many calls at a time."""

import asyncio
import threading
from concurrent.futures import Future
from types import TracebackType

from tandem_client.answers import Result
from tandem_client.async_calls import AsyncCalls
from tandem_client.images import Image
from tandem_client.options import CallOptions


class LoopThread:
    """Runs calls while its ``with`` block does; what is under way at its end is cancelled.

    The thread is a daemon: an interpreter that ends amid an iteration does not wait for it.
    """

    def __init__(self, calls: AsyncCalls, concurrency: int) -> None:
        self._calls, self._slots = calls, asyncio.Semaphore(concurrency)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="tandem-client", daemon=True
        )
        self._started = threading.Event()

    def __enter__(self) -> "LoopThread":
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def submit(self, index: int, image: Image, options: CallOptions) -> "Future[Result]":
        """Begin with an image as soon as a place is free."""
        return asyncio.run_coroutine_threadsafe(self._result(index, image, options), self._loop)

    async def _result(self, index: int, image: Image, options: CallOptions) -> Result:
        async with self._slots:
            return await self._calls.result(index, image, options)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._stop.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._calls.aclose()
