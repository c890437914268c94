"""Reads bodies with a content coding (gzip, deflate), bounded before anything is inflated."""

import asyncio
import zlib

from starlette.types import Receive

from app.errors import BadTensorError, BodyTooLargeError, UnsupportedCodingError
from app.http.body import read_body
from app.http.headers import Headers
from app.queueing.byte_budget import Share

# zlib's windowBits: 31 reads gzip's header and trailer, 15 zlib's, which HTTP calls deflate.
WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
STEP_BYTES = 2**18  # inflated at a time; the event loop has its turn in between


async def read_coded_body(
    receive: Receive, headers: Headers, max_bytes: int, share: Share
) -> bytes:
    """Return the whole body, inflated if it is coded; coded and inflated it has ``max_bytes``.

    Raises:
        BodyTooLargeError: it has more, as it comes or inflated.
        UnsupportedCodingError: another content coding.
        BadTensorError: the coded bytes are damaged.

    """
    coding = headers.text(b"content-encoding").strip().lower()
    if coding not in ("", "identity", *WINDOW_BITS):
        raise UnsupportedCodingError(
            f"Content-Encoding is {coding[:40]!r}; send gzip, deflate, or the body as it is"
        )
    body = await read_body(receive, headers.text(b"content-length"), max_bytes, share)
    if coding in WINDOW_BITS:
        return await _inflated(body, WINDOW_BITS[coding], max_bytes, share)
    return body


async def _inflated(coded: bytes, window_bits: int, max_bytes: int, share: Share) -> bytes:
    inflater, size = zlib.decompressobj(window_bits), 0
    parts: list[bytes] = []
    while not inflater.eof:
        try:
            part = inflater.decompress(coded, STEP_BYTES)
        except zlib.error as error:
            raise BadTensorError(f"the body cannot be inflated: {error}") from error
        coded = inflater.unconsumed_tail
        if not part and not coded and not inflater.eof:
            raise BadTensorError("the body cannot be inflated: it breaks off")
        size += len(part)
        if size > max_bytes:
            raise BodyTooLargeError(
                f"the body inflates to more than {max_bytes} bytes, the limit; send less at a time"
            )
        share.grow(len(part))
        parts.append(part)
        await asyncio.sleep(0)
    if inflater.unused_data:
        raise BadTensorError("bytes are left over after the coded body's end; send one gzip stream")
    return b"".join(parts)
