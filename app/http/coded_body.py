"""Reads bodies with a content coding (gzip, deflate), bounded before anything is inflated."""

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

from starlette.types import Receive

from app.errors import BadCodingError, BodyTooLargeError, UnsupportedCodingError
from app.http.body import announced_bytes, read_body, read_chunks, too_large
from app.http.headers import Headers
from app.queueing.byte_budget import Share

# zlib's windowBits: 31 reads gzip's header and trailer, 15 zlib's, which HTTP calls deflate.
WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
LENGTH = b"content-length"
SENT_AS = "send one gzip or deflate stream, or the body as it is"
STEP_BYTES = 2**18  # inflated at a time; the event loop has its turn in between


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
