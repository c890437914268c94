"""Notices clients that hang up while their request is answered, and cancels its task.

After the body the server's ``receive`` only ends with a disconnect. A waiting task per request
would cost CPU time. So requests that take longer run ``receive`` up to its first wait, and go on
when the future that it waits for is done.
"""

import asyncio
from collections.abc import Generator
from types import TracebackType
from typing import Any, Self

from starlette.types import Message, Receive

from app.errors import ClientGoneError

WATCHED_AFTER_S = 0.05  # from the body on; few requests live as long


class WatchedRequest:
    """A request whose block is cancelled if its client hangs up after the body was read.

    The body must be read by calling this object in place of ASGI's ``receive``.

    Raises:
        ClientGoneError: in place of the cancellation, at the end of the block.

    """

    __slots__ = ("_is_cancelled", "_later", "_receive", "_task", "_waiting")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[object] | None = None
        self._later: asyncio.TimerHandle | None = None
        self._waiting: Generator[Any, None, Message] | None = None
        self._is_cancelled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._later is not None:
            self._later.cancel()
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None
        if not self._is_cancelled or self._task is None:
            return
        # A cancellation by others must be passed on.
        if self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGoneError("the client hung up before its answer was there") from error

    async def __call__(self) -> Message:
        """Receive the next message; after the body the server only sends a disconnect."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._task = asyncio.current_task()
            self._later = asyncio.get_running_loop().call_later(WATCHED_AFTER_S, self._watch)
        return message

    def _watch(self) -> None:
        self._waiting = self._receive().__await__()
        self._go_on()

    def _go_on(self, _: object = None) -> None:
        """Run ``receive`` up to its next wait; cancel the task if it ended with a disconnect."""
        if self._waiting is None:  # the block has ended
            return
        try:
            future = next(self._waiting)
        except StopIteration as end:
            self._waiting = None
            if end.value["type"] == "http.disconnect" and self._task is not None:
                self._is_cancelled = True
                self._task.cancel()
            return
        if future is None:  # a bare yield: go on in the loop's next turn
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            future._asyncio_future_blocking = False  # as a task does with a future that it got
            future.add_done_callback(self._go_on)
