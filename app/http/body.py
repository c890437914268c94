"""Reads request bodies under their limit on bytes."""

from collections.abc import Callable
from typing import Any

from starlette.types import Receive

from app.errors import BodyTooLargeError, ClientGoneError
from app.queueing.byte_budget import Share

# A body over its limit is still read (and dropped) up to this many times the limit: a client that
# is cut off while it sends sees a broken connection, not the 413 that says why.
DRAIN_FACTOR = 4


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
