"""Reads request bodies and multipart forms under their limits on bytes and files."""

from collections.abc import AsyncGenerator

from starlette.requests import ClientDisconnect, Request

from app.errors import BodyTooLargeError, ClientGoneError
from app.http.form import FileForm
from app.queueing.byte_budget import Share

# A body over its limit is still read (and dropped) up to this many times the limit: a client that
# is cut off while it sends sees a broken connection, not the 413 that says why.
DRAIN_FACTOR = 4


def _too_large(announced: int, limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {announced} bytes or more, the limit is {limit}; "
        "send a smaller image (1,000 pixels a side are plenty) or fewer files per request"
    )


async def limited_stream(
    request: Request, max_bytes: int, share: Share
) -> AsyncGenerator[bytes, None]:
    """Yield the body's chunks, which count in ``share``.

    Raises:
        BodyTooLargeError: ``max_bytes`` are passed.
        OverloadedError: the bodies of all requests together hold too much.

    """
    seen = 0
    length = request.headers.get("content-length", "")
    announced = int(length) if length.isdecimal() else 0  # isdigit would take "²" too
    is_over = announced > max_bytes
    if not is_over:
        share.expect(announced)
    try:
        async for chunk in request.stream():
            seen += len(chunk)
            is_over = is_over or seen > max_bytes
            if not is_over:
                share.grow(len(chunk))
                yield chunk
            elif seen > DRAIN_FACTOR * max_bytes:
                break
    except ClientDisconnect as error:
        raise ClientGoneError(f"the client hung up after {seen} bytes") from error
    if is_over:
        raise _too_large(max(seen, announced), max_bytes)


async def read_body(request: Request, max_bytes: int, share: Share) -> bytes:
    """Return the whole body."""
    return b"".join([chunk async for chunk in limited_stream(request, max_bytes, share)])


async def read_files(request: Request, max_bytes: int, max_files: int, share: Share) -> list[bytes]:
    """Return the contents of a multipart form's files, in order; other fields are refused."""
    form = FileForm(request.headers.get("content-type", ""), max_files)
    async for chunk in limited_stream(request, max_bytes, share):
        form.write(chunk)
    return form.files()
