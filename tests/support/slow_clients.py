"""Clients that hold a connection and send next to nothing: until when are they let?"""

import asyncio
import time
from contextlib import suppress
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

DATA, HEADERS, SETTINGS = 0, 1, 4  # frames of HTTP/2, and their flags
END_STREAM, END_HEADERS = 1, 4


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


class HeadersAlone:
    """An HTTP/2 connection (RFC 9113) whose gRPC calls begin, and send a message only when told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer, self._next = writer, 1
        self.answered: dict[int, bytes] = {}  # streams, and their HEADERS as HPACK has them
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0))
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def connected(cls, port, source="127.0.0.1"):
        return cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0)))

    def begin(self, path, num=1, **metadata):
        """Begin ``num`` calls of a method, 100 at most at a time; return their streams."""
        pseudo = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
        fields = pseudo | {"content-type": "application/grpc", "te": "trailers"} | metadata
        block = b"".join(b"\0" + _text(name) + _text(fields[name]) for name in fields)
        streams = [*range(self._next, self._next + 2 * num, 2)]
        self._next += 2 * num
        self._writer.write(b"".join(_frame(HEADERS, END_HEADERS, n, block) for n in streams))
        return streams

    def send(self, stream, message=b""):
        prefixed = b"\0" + len(message).to_bytes(4, "big") + message
        self._writer.write(_frame(DATA, END_STREAM, stream, prefixed))

    async def _read(self, reader):
        with suppress(EOFError, ConnectionError):
            while True:
                head = await reader.readexactly(9)
                content = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == HEADERS:
                    self.answered.setdefault(int.from_bytes(head[5:], "big"), content)

    @property
    def is_closed(self):
        return self._reading.done()

    def close(self):
        self._reading.cancel()
        self._writer.close()


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    head = len(content).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + content


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _status(told: bytes) -> int:
    return int(told.split(b" ", 2)[1]) if told.startswith(b"HTTP/1.1 ") else 0
