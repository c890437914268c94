"""An event loop on its own thread, for blocking code."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from tandem_client.async_calls import AsyncCalls

T = TypeVar("T")
# Ctrl-C just before a thread starts to wait is noticed only after the wait.
NOTICED_WITHIN_S = 0.5


class LoopThread:
    """Runs calls on an event loop until ``close``, which cancels calls under way.

    A call on an event loop can be cancelled at any moment. With blocking sockets each read and
    write has a timeout, but a slow service can stretch a call over any number of them. The thread
    is a daemon, so an interpreter that exits during a call does not wait for it.
    """

    def __init__(self, calls: AsyncCalls) -> None:
        self._calls = calls
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="tandem client", daemon=True
        )
        self._started, self._lock = threading.Event(), threading.Lock()
        self._is_closed = False

    def __enter__(self) -> "LoopThread":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def submit(
        self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: object
    ) -> "concurrent.futures.Future[T]":
        """Start ``call(*arguments)`` on the thread; return its future."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the client is closed: make another")
            if not self._started.is_set():
                self._thread.start()
                self._started.wait()
            if not self._thread.is_alive():
                raise RuntimeError("a client works in one process: make one after a fork")
            return asyncio.run_coroutine_threadsafe(call(*arguments), self._loop)

    def run(self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: object) -> T:
        """Return the result of ``call(*arguments)``; Ctrl-C meanwhile cancels it."""
        future = self.submit(call, *arguments)
        try:
            wait_for_any([future])
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread and close the connections; later calls fail."""
        with self._lock:
            if self._started.is_set() and not self._is_closed:
                self._loop.call_soon_threadsafe(self._stop.set)
            self._is_closed = True
        if self._started.is_set():
            self._thread.join()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._stop.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._calls.aclose()


def wait_for_any(futures: "list[concurrent.futures.Future[T]]") -> None:
    """Wait until one of the futures is done."""
    while not any(future.done() for future in futures):
        concurrent.futures.wait(futures, NOTICED_WITHIN_S, concurrent.futures.FIRST_COMPLETED)
