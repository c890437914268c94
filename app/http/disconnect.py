"""Notices clients that hang up while their request is answered, and cancels its task.

A task that waits for the disconnect costs every request CPU time, and few live long enough
to need it: instead all requests under way are looked at together, every ``LOOK_EVERY_S``.
"""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Message, Receive

from app.errors import ClientGoneError

LOOK_EVERY_S = 0.05


class DisconnectWatch:
    """Looks after the requests of one process; all methods are called on its event loop."""

    def __init__(self) -> None:
        self._watched: set[WatchedRequest] = set()
        self._is_looking = False

    def request(self, receive: Receive) -> "WatchedRequest":
        """Return a context manager that ends its block once the client has hung up."""
        return WatchedRequest(self, receive)

    def add(self, request: "WatchedRequest") -> None:
        """Begin to look after a request."""
        self._watched.add(request)
        if not self._is_looking:
            self._look_later()

    def remove(self, request: "WatchedRequest") -> None:
        """Stop looking after a request."""
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
    """One request: the block is cancelled if its client hangs up once the body has been read.

    The body is to be read by calling this object, as one calls ASGI's ``receive``.

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
        # If somebody else cancelled the task too, that is not ours to swallow.
        if self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGoneError("the client hung up before its answer was there") from error

    async def __call__(self) -> Message:
        """Receive the next message; after the body's end the server has only a disconnect left."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._task = asyncio.current_task()
            self._watch.add(self)
        return message

    def has_hung_up(self) -> bool:
        """Whether there is a disconnect to hear; takes only the first step of ``receive``."""
        step = self._receive()
        try:
            step.send(None)  # type: ignore[attr-defined]  # a coroutine, by ASGI an awaitable
        except StopIteration as told:
            return bool(told.value["type"] == "http.disconnect")
        step.close()  # type: ignore[attr-defined]  # it would wait: nothing has happened
        return False

    def cancel(self) -> None:
        """Cancel the request's task."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()
