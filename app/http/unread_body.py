"""Ends the connection of a request that was answered before its body was read to the end."""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.queueing.haproxy_headers import CLOSE_HEADER

CLOSING = [(b"connection", b"close"), (CLOSE_HEADER.encode("ascii"), b"1")]
NO_BODY = (b"", b"0")
MAX_READS = 8  # of what has come
NOT_READ = (401, 408)  # whose bodies are of no use to anybody


class ClosedUnread:
    """Stands before the interface.

    Else nobody would bound the time that the rest takes, be it a byte a minute: the server drops
    it as it comes. What has already come is read, so that who sent little keeps the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and hear of its answer."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        is_read = False

        async def receive_and_note() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body", False)
            return message

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_read:
                if message["status"] not in NOT_READ and not asks_to_continue(scope):
                    await read_what_is_here()
                if not is_read:
                    message["headers"] = [*message.get("headers", ()), *CLOSING]
            await send(message)

        async def read_what_is_here() -> None:
            num = MAX_READS
            with suppress(TimeoutError):
                async with asyncio.timeout(0):  # never waits
                    while num and not is_read:
                        await receive_and_note()
                        num -= 1

        await self._app(scope, receive_and_note, send_and_close)


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value not in NO_BODY)
        for name, value in scope["headers"]
    )


def asks_to_continue(scope: Scope) -> bool:
    """Whether the client sends no body before it is told to; to read tells it."""
    return any(name == b"expect" for name, _ in scope["headers"])
