"""Reads request bodies under their limits; ends connections whose body nobody reads to its end."""

import asyncio
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import (
    BadCodingError,
    BodyTooLargeError,
    ClientGoneError,
    UnsupportedCodingError,
)
from app.http.headers import Headers
from app.queueing.byte_budget import Share
from app.queueing.haproxy_headers import CLOSE_HEADER

# A body over its limit is still read (and dropped) up to this many times the limit: a client that
# is cut off while it sends sees a broken connection, not the 413 that says why.
DRAIN_FACTOR = 4
# zlib's windowBits: 31 reads gzip's header and trailer, 15 zlib's, which HTTP calls deflate.
WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
LENGTH = b"content-length"
SENT_AS = "send one gzip or deflate stream, or the body as it is"
STEP_BYTES = 2**18  # inflated at a time; the event loop has its turn in between
CLOSING = [(b"connection", b"close"), (CLOSE_HEADER.encode("ascii"), b"1")]
NO_BODY = (b"", b"0")
MAX_READS = 8  # of what has come
NOT_READ = (401, 408)  # whose bodies are of no use to anybody


def too_large(announced: int, limit: int) -> BodyTooLargeError:
    """Return the error of a body of so many bytes."""
    return BodyTooLargeError(
        f"the body has {announced} bytes or more, the limit is {limit}; "
        "send a smaller image (1,000 pixels a side are plenty) or fewer files per request"
    )


def announced_bytes(content_length: str) -> int:
    """Return what a Content-Length header announces; 0 if it is no number."""
    return int(content_length) if content_length.isdecimal() else 0  # isdigit would take "²" too


async def read_chunks(
    receive: Receive,
    content_length: str,
    max_bytes: int,
    share: Share,
    take: Callable[[bytes], Any],
) -> None:
    """Read the body to its end and give each chunk, which counts in ``share``, to ``take``.

    Raises:
        BodyTooLargeError: ``max_bytes`` are passed.
        ClientGoneError: the client hung up.
        OverloadedError: the bodies of all requests together hold too much.

    """
    seen, announced = 0, announced_bytes(content_length)
    is_over = announced > max_bytes
    if not is_over:
        share.expect(announced)
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError(f"the client hung up after {seen} bytes")
        has_more = message.get("more_body", False)
        if not (chunk := message.get("body", b"")):
            continue
        seen += len(chunk)
        is_over = is_over or seen > max_bytes
        if not is_over:
            share.grow(len(chunk))
            take(chunk)
        elif seen > DRAIN_FACTOR * max_bytes:
            break
    if is_over:
        raise too_large(max(seen, announced), max_bytes)


async def read_body(receive: Receive, content_length: str, max_bytes: int, share: Share) -> bytes:
    """Return the whole body."""
    chunks: list[bytes] = []
    await read_chunks(receive, content_length, max_bytes, share, chunks.append)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_coded_body(
    receive: Receive, headers: Headers, max_bytes: int, share: Share
) -> bytes:
    """Return the whole body; see :func:`read_coded_chunks`."""
    chunks: list[bytes] = []
    await read_coded_chunks(receive, headers, max_bytes, share, chunks.append)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_coded_chunks(
    receive: Receive,
    headers: Headers,
    max_bytes: int,
    share: Share,
    take: Callable[[bytes], Any],
) -> None:
    """Read the body to its end and give each chunk to ``take``, inflated if the body is coded.

    Coded and inflated it has ``max_bytes``; all of it counts in ``share``.

    Raises:
        BodyTooLargeError: it has more, as it comes, inflated, or as a client announces that waits
            to be told to send it.
        UnsupportedCodingError: another content coding.
        BadCodingError: the coded bytes are damaged.

    """
    coding, length = headers.text(b"content-encoding").strip().lower(), headers.text(LENGTH)
    if coding not in ("", "identity", *WINDOW_BITS):
        raise UnsupportedCodingError(
            f"Content-Encoding is {coding[:40]!r}; send gzip, deflate, or the body as it is"
        )
    if headers.get(b"expect") is not None and (size := announced_bytes(length)) > max_bytes:
        raise too_large(size, max_bytes)
    if coding in WINDOW_BITS:
        body = await read_body(receive, length, max_bytes, share)
        await _inflate(body, WINDOW_BITS[coding], max_bytes, share, take)
    else:
        await read_chunks(receive, length, max_bytes, share, take)


async def _inflate(
    coded: bytes, window_bits: int, max_bytes: int, share: Share, take: Callable[[bytes], Any]
) -> None:
    inflater, size = zlib.decompressobj(window_bits), 0
    while not inflater.eof:
        try:
            part = inflater.decompress(coded, STEP_BYTES)
        except zlib.error as error:
            raise BadCodingError(f"the body cannot be inflated: {error}; {SENT_AS}") from error
        coded = inflater.unconsumed_tail
        if not part and not coded and not inflater.eof:
            raise BadCodingError(f"the body cannot be inflated: it breaks off; {SENT_AS}")
        size += len(part)
        if size > max_bytes:
            raise BodyTooLargeError(
                f"the body inflates to more than {max_bytes} bytes, the limit; send less at a time"
            )
        share.grow(len(part))
        take(part)
        await asyncio.sleep(0)
    if inflater.unused_data:
        raise BadCodingError(f"bytes are left over after the coded body's end; {SENT_AS}")


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
