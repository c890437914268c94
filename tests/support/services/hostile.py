"""Requests that no client should send, drawn up by code, each with what the service must answer."""

import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import cv2
import httpx
import numpy as np

from models.image_files import KINDS

MEGABYTE = 10**6
CHUNK = bytes(64 * 1024)
BOUNDARY = "the-boundary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


@dataclass(frozen=True)
class Hostile:
    """One request; ``make`` gives its body, ``says`` is a pattern its error message must match."""

    name: str
    make: Callable[[], bytes | Iterator[bytes]]
    status: int
    code: str = ""
    says: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    query: str = ""
    is_heavy: bool = False


def send(client: httpx.Client, hostile: Hostile) -> httpx.Response:
    return client.post(
        f"/v1/classify{hostile.query}", content=hostile.make(), headers=hostile.headers
    )


def jpeg(width: int = 64, height: int = 48) -> bytes:
    return _encoded(".jpg", width, height)


def png(width: int = 64, height: int = 48) -> bytes:
    return _encoded(".png", width, height)


def _encoded(suffix: str, width: int, height: int) -> bytes:
    image = np.random.default_rng(width + height).integers(0, 256, (height, width, 3), np.uint8)
    return cv2.imencode(suffix, image)[1].tobytes()


def announcing_jpeg(width: int, height: int) -> bytes:
    """Return a JPEG whose frame header announces another size than it has; below 2 KB."""
    data = bytearray(jpeg(16, 16))
    frame = data.index(b"\xff\xc0")  # marker, length (2), precision (1), height, width
    struct.pack_into(">HH", data, frame + 5, height, width)
    assert len(data) < 2048
    return bytes(data)


def announcing_png(width: int, height: int) -> bytes:
    """Return a PNG whose header (its CRC is right) announces another size than it has."""
    data = bytearray(png(4, 4))
    struct.pack_into(">II", data, 16, width, height)
    struct.pack_into(">I", data, 29, zlib.crc32(data[12:29]))
    assert len(data) < 2048
    return bytes(data)


def form(*files: bytes) -> bytes:
    """Return a multipart body of ``files``; ``FORM`` are its headers."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
    parts = [head.encode() + data + b"\r\n" for data in files]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def zeros_in_chunks(size: int) -> Iterator[bytes]:
    """Yield zeros without saying beforehand how many: httpx sends them chunked."""
    for _ in range(size // len(CHUNK)):
        yield CHUNK


def hang_up(url: str, announced: int = 200_000) -> None:
    """Send headers and half the body they announce, then close the connection."""
    where = urlsplit(url)
    head = f"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: {announced}\r\n\r\n"
    with socket.create_connection((where.hostname, where.port), 10) as connection:
        connection.sendall(head.encode() + jpeg()[:1000].ljust(announced // 2, b"\0"))


GIF = b"GIF89a\x01\x00\x01\x00\x80\x00\x00\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;"
SVG = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
TEXT = b"this is a text about a cat, not a picture of one\n" * 40


_not_an_image = partial(
    Hostile, status=400, code="not_an_image", says=rf"\d+ bytes.*send a {KINDS}"
)
_corrupt = partial(Hostile, status=400, code="corrupt_image", says="send the whole file")
_too_many_pixels = partial(
    Hostile,
    status=422,
    code="too_many_pixels",
    says=r"65000 x 65000.*at most [\d,]+.*send a smaller picture",
)
_not_decoded = partial(Hostile, status=415, code="unsupported_format")
_too_many_bytes = partial(
    Hostile,
    status=413,
    code="too_many_bytes",
    says=r"the limit is \d+; send a smaller image",
    is_heavy=True,
)
_bad_parameter = partial(Hostile, status=422, code="bad_parameter")
_bad_form = partial(_bad_parameter, says="curl -F files=@", headers=FORM)


PICTURES = (
    _not_an_image("an empty body", bytes),
    _not_an_image("text", lambda: TEXT),
    _corrupt("a truncated JPEG", lambda: jpeg()[:-300]),
    _corrupt("a truncated PNG", lambda: png()[:-300]),
    _corrupt("the header of a JPEG", lambda: jpeg()[:30]),
    _corrupt("a JPEG of no pixels", lambda: announcing_jpeg(0, 16), says="0 x 16.*send another"),
    _corrupt("a PNG of no pixels", lambda: announcing_png(0, 0), says="0 x 0.*send another"),
    _corrupt("a PNG that announces more", lambda: announcing_png(900, 900), says="send it again"),
    _too_many_pixels("a huge JPEG", lambda: announcing_jpeg(65_000, 65_000)),
    _too_many_pixels("a huge PNG", lambda: announcing_png(65_000, 65_000)),
    _not_decoded("GIF", lambda: GIF, says=f"GIF.*send {KINDS}"),
    _not_decoded("SVG", lambda: SVG, says=f"SVG.*send {KINDS}"),
    Hostile("a JPEG of one pixel", lambda: jpeg(1, 1), 200),
    Hostile("a PNG of one pixel", lambda: png(1, 1), 200),
    Hostile("a strip 1 wide", lambda: jpeg(1, 10_000), 200),
    Hostile("a strip 1 high", lambda: png(10_000, 1), 200),
    Hostile("a JPEG with garbage after it", lambda: jpeg() + b"\0garbage" * 500, 200),
    Hostile("a JPEG called text", jpeg, 200, headers={"content-type": "text/plain"}),
)
BODIES = (
    _too_many_bytes("40 MB announced", lambda: bytes(40 * MEGABYTE)),
    _too_many_bytes("40 MB in chunks", lambda: zeros_in_chunks(40 * MEGABYTE)),
    _not_an_image("19 MB of zeros", lambda: bytes(19 * MEGABYTE), is_heavy=True),
)
PARAMETERS = (
    *(
        _bad_parameter(f"top_k={value}", jpeg, says=says, query=f"?top_k={value}")
        for value, says in (
            ("0", r"top_k is 0;.*ask for 1 to \d+"),
            ("9999", r"top_k is 9999;.*ask for 1 to \d+"),
            ("x", "top_k is 'x'.*see /docs"),
        )
    ),
    *(
        _bad_parameter(
            f"a time of {value}",
            jpeg,
            says=f"'{value}'.*seconds as a number above 0",
            headers={"x-request-timeout-seconds": value},
        )
        for value in ("nan", "-1", "0", "soon")
    ),
)
MANY = "more than 64 files.*several requests"
UNBOUND = {"content-type": "multipart/form-data"}
FORMS = (
    Hostile("too many files", lambda: form(*[jpeg()] * 65), 413, "too_many_files", MANY, FORM),
    _bad_form("a form without a file", form),
    _bad_form("a form that begins late", lambda: form(jpeg())[5:], says="send the image itself"),
    _bad_form(
        "a form cut in its second file", lambda: form(jpeg(), jpeg())[:-60], says="breaks off"
    ),
    _bad_form(
        "a form without a boundary", lambda: form(jpeg()), says="boundary.*curl -F", headers=UNBOUND
    ),
)
CORPUS = (*PICTURES, *BODIES, *PARAMETERS, *FORMS)
