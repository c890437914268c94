"""Reads request bodies within limits: coded bodies, multipart forms, and small JSON objects.

Connections whose body is not read to the end are closed.
"""

import asyncio
import random
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access import ANYONE, Caller
from app.errors import (
    CLOSE_HEADER,
    MAX_SHOWN,
    BadCodingError,
    BadParameterError,
    BodyTooLargeError,
    ClientGoneError,
    SlowBodyError,
    TooManyFilesError,
    UnsupportedCodingError,
)
from app.queueing.admission import ByteBudget, Share
from models.errors import TandemError
from models.image_files import name_beginning

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


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
# A file name in RFC 5987's form, which some clients send alone if it is not ASCII.
EXTENDED_FILENAME = re.compile(r";[ \t]*filename\*[0-9*]*[ \t]*=", re.IGNORECASE)
PLAIN_ENCODINGS = ("", "7bit", "8bit", "binary")
# Pages and gateways may add text fields to a form, which are ignored. A field with the name of our
# parameter is an error, since the client meant it to have an effect.
MAX_TEXTS, MAX_TEXT_BYTES = 16, 1024
PARAMETERS = (
    *(b"top_k", b"threshold", b"model_set"),
    *(b"plan", b"answer_set", b"regions", b"embedding"),
)
MAX_BYTES = 64 * 2**10  # of a small JSON object
REQUEST_ID = b"x-request-id"
CALLER = "tandem.caller"  # in a scope: whose request it is
MADE_ID = "tandem.request_id"  # in a scope without the header: all that read it see one id


class Headers:
    """Headers by lower-case name; of repeated ones the first."""

    def __init__(self, scope: Scope) -> None:
        self._scope, self._sent = scope, scope["headers"]
        self._values: dict[bytes, bytes] = dict(reversed(self._sent))

    def get(self, name: bytes) -> str | None:
        value = self._values.get(name)
        return None if value is None else value.decode("latin-1")

    def __contains__(self, name: bytes) -> bool:
        return name in self._values

    def joined(self, name: bytes) -> str | None:
        """Return the values of a header that may be repeated, joined; None if it is absent."""
        if name not in self._values:
            return None
        return ", ".join(value.decode("latin-1") for sent, value in self._sent if sent == name)

    def text(self, name: bytes) -> str:
        return self._values.get(name, b"").decode("latin-1")

    @property
    def caller(self) -> Caller:
        """Whose request it is, once its key was checked."""
        caller: Caller = self._scope.get(CALLER, ANYONE)
        return caller

    @cached_property
    def request_id(self) -> str:
        """The X-Request-ID: the client's, or one that Serve made and sends back."""
        return self.text(REQUEST_ID) or self._scope.setdefault(MADE_ID, new_request_id())


def new_request_id() -> str:
    """Return a UUID of version 4, in the form that Serve uses.

    It does not use the system's random numbers: that call releases the GIL, and getting it back may
    take milliseconds while other threads decode. The id is not a secret.
    """
    digits = f"{random.getrandbits(128):032x}"
    variant = "89ab"[random.getrandbits(2)]  # of RFC 9562; the 4 is its version
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


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


async def read_body(
    request: Request, headers: Headers, max_bytes: int, share: Share, timeout_s: float
) -> bytes:
    """Return the whole body, as :func:`read_coded_body`; :class:`SlowBodyError` if it is late."""
    try:
        async with asyncio.timeout(timeout_s):
            return await read_coded_body(request.receive, headers, max_bytes, share)
    except TimeoutError as error:
        text = f"the body had not arrived after {timeout_s:g} s; send it at once"
        raise SlowBodyError(text) from error


async def read_coded_chunks(
    receive: Receive, headers: Headers, max_bytes: int, share: Share, take: Callable[[bytes], Any]
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
                asks_to_continue = any(name == EXPECT for name, _ in scope["headers"])
                if message["status"] not in NOT_READ and not asks_to_continue:
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
    for name, value in scope["headers"]:  # a generator would be a call for each
        if name == b"transfer-encoding" or (name == LENGTH and value not in NO_BODY):
            return True
    return False


class FileForm:
    """Collects the files of a form while its bytes arrive.

    Field names and file names are not used or decoded, and a ``charset`` parameter is ignored: a
    codec that the client chooses might raise anything.
    """

    def __init__(self, content_type: str, max_files: int) -> None:
        """Read the boundary from the request's Content-Type.

        Raises :class:`BadParameterError` if there is no boundary, or it is invalid.
        """
        _, parameters = parse_options_header(content_type)
        boundary = parameters.get(b"boundary")
        if not boundary:
            raise _broken(f"Content-Type {content_type[:MAX_SHOWN]!r} has no boundary")
        self._parts = _Parts(max_files)
        try:
            self._parser = MultipartParser(boundary, self._parts.callbacks())
        except FormParserError as error:
            raise _broken(str(error)) from error

    def write(self, chunk: bytes) -> None:
        """Parse the next bytes of the body.

        Raises:
            BadParameterError: the bytes are not a multipart form, or it has large or many texts.
            TooManyFilesError: there are more files than the limit.
        """
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _broken(str(error)) from error

    def files(self) -> list[bytes]:
        """Return the contents of the files, after the whole body was written.

        Raises :class:`BadParameterError` if the form is incomplete, or has no file.
        """
        if not self._parts.are_all:
            raise _broken("it breaks off before its closing boundary")
        if not self._parts.files:
            empty = ", and a file field that is empty" if self._parts.num_unused else ""
            raise BadParameterError(
                f"the form has no file{empty}; send one as curl -F files=@photo.jpg does"
            )
        return self._parts.files


class _Parts:
    """The parsed parts, without a reference to the parser, which refers to this object.

    A reference cycle would keep a form's files until the garbage collector runs.
    """

    def __init__(self, max_files: int) -> None:
        self._max_files = max_files
        self.are_all = False
        self.files: list[bytes] = []
        self._name, self._value = bytearray(), bytearray()  # of the current header
        self._headers: dict[str, str] = {}  # of the current part
        self._content = bytearray()  # of the current part
        self._is_file, self._num_texts = True, 0
        self._is_unnamed, self.num_unused = False, 0  # file fields in which nobody chose a file

    def callbacks(self) -> "MultipartCallbacks":
        """Return the parser's callbacks."""
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._check_headers,
            "on_part_data": self._add_content,
            "on_part_end": self._end_part,
            "on_end": self._end_form,
        }

    def _begin_part(self) -> None:
        self._headers = {}

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._name.decode("latin-1").lower()] = self._value.decode("latin-1").strip()
        self._name, self._value = bytearray(), bytearray()

    def _check_headers(self) -> None:
        disposition = self._headers.get("content-disposition", "")
        _, parameters = parse_options_header(disposition)
        if b"name" not in parameters:
            raise _broken("a part has no Content-Disposition with a name")
        self._is_file = (
            b"filename" in parameters
            or EXTENDED_FILENAME.search(disposition) is not None
            or self._headers.get("content-type", "").lower().startswith("image/")
        )
        self._is_unnamed = parameters.get(b"filename") == b""
        if self._is_file:
            self._check_file()
        else:
            self._check_text(parameters[b"name"])

    def _check_text(self, name: bytes) -> None:
        if name in PARAMETERS:
            raise BadParameterError(
                f"the form has a text field {name.decode()}; parameters belong in the address "
                f"(?{name.decode()}=...)"
            )
        self._num_texts += 1
        if self._num_texts > MAX_TEXTS:
            raise BadParameterError(
                f"the form has more than {MAX_TEXTS} text fields; they have no effect: send files"
            )

    def _check_file(self) -> None:
        encoding = self._headers.get("content-transfer-encoding", "")
        if encoding.lower() not in PLAIN_ENCODINGS:
            raise BadParameterError(
                f"a file has Content-Transfer-Encoding {encoding[:MAX_SHOWN]!r}, which "
                "forms do not have (RFC 7578); send its bytes as they are"
            )
        if not self._is_unnamed:
            self._check_number()
        elif self.num_unused == MAX_TEXTS:
            raise BadParameterError(
                f"the form has more than {MAX_TEXTS} empty file fields; leave them out"
            )

    def _check_number(self) -> None:
        if len(self.files) == self._max_files:
            raise TooManyFilesError(
                f"more than {self._max_files} files in one request; send them in several requests"
            )

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]
        if not self._is_file and len(self._content) > MAX_TEXT_BYTES:
            wrapping = name_beginning(bytes(self._content[:MAX_TEXT_BYTES]))
            what = f", {wrapping[0]}" if wrapping else ""
            raise BadParameterError(
                f"the form has a text field of more than {MAX_TEXT_BYTES} bytes{what}; an image "
                "is sent with a file name, or with Content-Type image/..., as curl -F "
                "files=@photo.jpg does"
            )

    def _end_part(self) -> None:
        if self._is_unnamed and not self._content:  # as browsers send it (HTML, "form data set")
            self.num_unused += 1
        elif self._is_file:
            self._check_number()
            self.files.append(bytes(self._content))
        self._content = bytearray()

    def _end_form(self) -> None:
        self.are_all = True


def _broken(reason: str) -> BadParameterError:
    return BadParameterError(
        f"this is not a multipart form: {reason}; "
        "send the image itself as the body, or files as curl -F files=@photo.jpg does"
    )


async def read_fields(
    request: Request,
    timeout_s: float,
    wrong: type[TandemError],
    wanted: str,
    *,
    may_be_empty: bool = False,
) -> dict[str, Any]:
    """Return the JSON object in a body of at most ``MAX_BYTES``, inflated if it is coded.

    Args:
        request: the request, whose body is still to come.
        timeout_s: the limit for the whole body.
        wrong: the class of the error for other content.
        wanted: the expected content, for that error's message.
        may_be_empty: whether an empty body is an object without fields.

    Raises:
        TandemError: an error of the class ``wrong``: the body is not a JSON object.
        SlowBodyError, BodyTooLargeError: it does not arrive in time, or is too large.
        BadCodingError, UnsupportedCodingError: its coding is damaged, or another one.
    """
    with ByteBudget(2 * MAX_BYTES).share() as share:  # coded and inflated
        body = await read_body(request, Headers(request.scope), MAX_BYTES, share, timeout_s)
    if may_be_empty and not body:
        return {}
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise wrong(f"the body is no JSON: {error.msg}") from error
    if not isinstance(fields, dict):
        raise wrong(f"the body is no object; send {wanted}")
    return fields
