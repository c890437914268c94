"""Clients that hold a connection and send next to nothing: until when are they let?"""

import asyncio
import time
from dataclasses import dataclass

PATH = b"/v1/classify"
HEAD = b"POST " + PATH + b" HTTP/1.1\r\nHost: x\r\n"
BUFFER = 16 * 1024  # HAProxy's: what it waits for before it asks a replica
# What each kind sends at once, and then again and again, a little at a time.
KINDS = {
    "idle": (b"", b""),
    "headers": (HEAD + b"X-Slow: ", b"a"),
    "body": (HEAD + b"Content-Length: 1000000\r\n\r\n", b"a"),
    "late body": (HEAD + b"Content-Length: 1000000\r\n\r\n" + bytes(2 * BUFFER), b"a"),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
}


@dataclass(frozen=True)
class Cut:
    """How a slow client ended: after how long, and what it was told (0: nothing)."""

    kind: str
    after_s: float
    status: int


async def linger(host, port, kind, give_up_s, every_s=1.0, path=""):
    """Hold one connection until the service closes it, or for ``give_up_s`` seconds (status -1)."""
    begin, more = KINDS[kind]
    begin = begin.replace(PATH, path.encode() or PATH, 1)
    started, told = time.monotonic(), b""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(begin)
        while (waited := time.monotonic() - started) < give_up_s:
            writer.write(more)
            try:
                async with asyncio.timeout(every_s):
                    piece = await reader.read(65536)
            except TimeoutError:
                continue
            if not piece:
                return Cut(kind, waited, _status(told))
            told += piece
        return Cut(kind, give_up_s, -1)
    except ConnectionError:
        return Cut(kind, time.monotonic() - started, _status(told))
    finally:
        writer.close()


def _status(told: bytes) -> int:
    return int(told.split(b" ", 2)[1]) if told.startswith(b"HTTP/1.1 ") else 0
