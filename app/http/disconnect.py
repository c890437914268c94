"""Notices clients that hang up while their request is answered, and cancels its task.

A waiting task per request would cost CPU time, though few requests live long enough to need it. So
all requests under way are checked together, every ``LOOK_EVERY_S``.
"""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Message, Receive

from app.errors import ClientGoneError

LOOK_EVERY_S = 0.05


class DisconnectWatch:
    """Watches the requests of a process; all methods must be called on its event loop."""

    def __init__(self) -> None:
        self._watched: set[WatchedRequest] = set()
        self._is_looking = False

    def request(self, receive: Receive) -> "WatchedRequest":
        """Return a context manager that cancels its block once the client has hung up."""
        return WatchedRequest(self, receive)

    def add(self, request: "WatchedRequest") -> None:
        self._watched.add(request)
        if not self._is_looking:
            self._look_later()

    def remove(self, request: "WatchedRequest") -> None:
        self._watched.discard(request)

    def _look_later(self) -> None:
        self._is_looking = True
        asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._is_looking = False
        for request in [request for request in self._watched if request.has_hung_up()]:
            self._watched.discard(request)
            request.cancel()
        if self._watched:
            self._look_later()


class WatchedRequest:
    """A request whose block is cancelled if its client hangs up after the body was read.

    The body must be read by calling this object in place of ASGI's ``receive``.

    Raises:
        ClientGoneError: in place of the cancellation, at the end of the block.

    """

    def __init__(self, watch: DisconnectWatch, receive: Receive) -> None:
        self._watch, self._receive = watch, receive
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.remove(self)
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
            self._watch.add(self)
        return message

    def has_hung_up(self) -> bool:
        """Whether a disconnect has arrived; runs ``receive`` only up to its first wait."""
        step = self._receive()
        try:
            step.send(None)  # type: ignore[attr-defined]  # a coroutine, by ASGI an awaitable
        except StopIteration as message:
            return bool(message.value["type"] == "http.disconnect")
        step.close()  # type: ignore[attr-defined]  # it would wait, since nothing has happened
        return False

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()
