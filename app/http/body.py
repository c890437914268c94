"""Reads request bodies within limits; closes connections whose body is not read to the end."""

import asyncio
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import (
    MAX_SHOWN,
    BadCodingError,
    BodyTooLargeError,
    ClientGoneError,
    UnsupportedCodingError,
)
from app.http.headers import Headers
from app.queueing.byte_budget import Share
from app.queueing.haproxy_headers import CLOSE_HEADER

# A body over its limit is still read and dropped, up to this many times the limit: a client that is
# cut off while sending would see a broken connection instead of the 413.
DRAIN_FACTOR = 4
# zlib's windowBits: 31 for gzip's header and trailer, 15 for zlib's, which HTTP calls deflate.
WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
LENGTH, CODING, EXPECT = b"content-length", b"content-encoding", b"expect"
SENT_AS = "send one gzip or deflate stream, or the body as it is"
STEP_BYTES = 2**18  # inflated at a time, between turns of the event loop
CLOSING = [(b"connection", b"close"), (CLOSE_HEADER.encode("ascii"), b"1")]
NO_BODY = (b"", b"0")
MAX_READS = 8  # of data that has already arrived
NOT_READ = (401, 408)  # statuses after which the body is not needed


def too_large(announced: int, limit: int) -> BodyTooLargeError:
    """Return the error for a body of ``announced`` bytes."""
    return BodyTooLargeError(
        f"the body has {announced} bytes or more, the limit is {limit}; "
        "send a smaller image (1,000 pixels a side are plenty) or fewer files per request"
    )


def announced_bytes(content_length: str) -> int:
    """Return the length in a Content-Length header; 0 if it is not a number."""
    return int(content_length) if content_length.isdecimal() else 0  # isdigit would accept "²" too


async def read_chunks(
    receive: Receive,
    content_length: str,
    max_bytes: int,
    share: Share,
    take: Callable[[bytes], Any],
) -> None:
    """Read the body to its end; pass each chunk to ``take`` and count it in ``share``.

    Raises:
        BodyTooLargeError: the body has more than ``max_bytes``.
        ClientGoneError: the client hung up.
        OverloadedError: the bodies of all requests together are too large.

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


async def read_coded_body(
    receive: Receive, headers: Headers, max_bytes: int, share: Share
) -> bytes:
    """Return the whole body; see :func:`read_coded_chunks`."""
    chunks: list[bytes] = []
    await read_coded_chunks(receive, headers, max_bytes, share, chunks.append)
    return b"".join(chunks)  # a single chunk is not copied


async def read_coded_chunks(
    receive: Receive,
    headers: Headers,
    max_bytes: int,
    share: Share,
    take: Callable[[bytes], Any],
) -> None:
    """Read the body to its end; pass each chunk to ``take``, inflated if the body is coded.

    ``max_bytes`` limits the coded and the inflated length; both count in ``share``.

    Raises:
        BodyTooLargeError: the body is longer, coded or inflated, or a client that waits for "100
            Continue" announces more.
        UnsupportedCodingError: another content coding.
        BadCodingError: the coded bytes are damaged.

    """
    length = headers.text(LENGTH)
    coding = headers.text(CODING).strip().lower() if CODING in headers else ""
    if coding not in ("", "identity", *WINDOW_BITS):
        raise UnsupportedCodingError(
            f"Content-Encoding is {coding[:MAX_SHOWN]!r}; send gzip, deflate, or the body as it is"
        )
    if EXPECT in headers and (size := announced_bytes(length)) > max_bytes:
        raise too_large(size, max_bytes)
    if coding in WINDOW_BITS:
        chunks: list[bytes] = []
        await read_chunks(receive, length, max_bytes, share, chunks.append)
        await _inflate(b"".join(chunks), WINDOW_BITS[coding], max_bytes, share, take)
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
    """ASGI middleware that closes connections whose body was not read to its end.

    Otherwise the server would drop the rest as it comes, for any time, at any rate. Bytes that have
    already arrived are read first, so that short bodies keep the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    for name, value in scope["headers"]:
        if name == b"transfer-encoding" or (name == b"content-length" and value not in NO_BODY):
            return True
    return False


def asks_to_continue(scope: Scope) -> bool:
    """Whether the client waits for "100 Continue", which reading the body sends."""
    return any(name == b"expect" for name, _ in scope["headers"])
