"""Reads request bodies and multipart forms under their limits."""

from collections.abc import AsyncGenerator

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from app.errors import BadParameterError, BodyTooLargeError, ClientGoneError, TooManyFilesError
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


class WholeFormParser(MultiPartParser):
    """Refuses a form that breaks off: starlette drops the file that was cut short, unsaid."""

    def __init__(
        self, headers: Headers, stream: AsyncGenerator[bytes, None], max_files: int
    ) -> None:
        super().__init__(headers, self._checked(stream), max_files=max_files, max_fields=0)
        self._is_whole = False

    def on_end(self) -> None:  # at the closing boundary
        self._is_whole = True

    async def _checked(self, stream: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async for chunk in stream:
            yield chunk
        if not self._is_whole:
            raise MultiPartException("it breaks off before its closing boundary")


async def read_files(request: Request, max_bytes: int, max_files: int, share: Share) -> list[bytes]:
    """Return the contents of a multipart form's files, in order; other fields are refused."""
    stream = limited_stream(request, max_bytes, share)
    # One more than the limit is let in, so that "too many" can be told from a broken form.
    parser = WholeFormParser(request.headers, stream, max_files + 1)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        if "Too many files" in error.message:
            raise _too_many(max_files) from error
        if "Too many fields" in error.message:
            raise BadParameterError(
                "the form has a text field; send files only, parameters in the address (?top_k=3)"
            ) from error
        raise BadParameterError(
            f"this is not a multipart form: {error.message}; "
            "send the image itself as the body, or files as curl -F files=@photo.jpg does"
        ) from error
    try:
        uploads = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if not uploads:
            raise BadParameterError(
                "the form has no file; send one as curl -F files=@photo.jpg does"
            )
        if len(uploads) > max_files:
            raise _too_many(max_files)
        return [await upload.read() for upload in uploads]
    finally:
        await form.close()


def _too_many(max_files: int) -> TooManyFilesError:
    return TooManyFilesError(
        f"more than {max_files} files in one request; send them in several requests"
    )
