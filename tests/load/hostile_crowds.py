"""Clients that take the service from others without breaking a rule of HTTP, from a process each.

Stalled calls: on six connections of HTTP/2 a hundred gRPC calls each announce a message of 1 MB,
send 16 KB of it, and then a byte every 8 s; one that ends is made again a second later. A crowd:
40 clients ask one member of the ensemble for photos, each without a pause.
"""

import asyncio
import struct
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
from apart import apart
from good_load import GoodLoad
from hostile_calls import over_grpc

from tests.support.open_inference import images

METHODS = ("ServerLive", "ModelReady")  # nothing is to be read of the first one
NUM_CONNECTIONS, NUM_STREAMS = 6, 100
ANNOUNCED_BYTES, SENT_BYTES, EVERY_S, AGAIN_AFTER_S = 10**6, 16_000, 8.0, 1.0
NUM_CROWD, CROWD_MEMBER = 40, "imagenette.resnet50"
READY_EVERY_S, READY_WITHIN_S = 1.0, 5.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
FRAME = struct.Struct(">BHBBI")  # length (3 bytes), type, flags, stream


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    length = len(payload)
    return FRAME.pack(length >> 16, length & 0xFFFF, kind, flags, stream) + payload


def _head(method: str) -> bytes:
    """Return a gRPC call's header block, each field literal and unindexed (RFC 7541, 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/inference.GRPCInferenceService/{method}",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


class StalledCalls:
    """One connection and its calls, which stall."""

    def __init__(self, port: int, ends: Counter[str]) -> None:
        self._port, self._ends = port, ends
        self._open: dict[int, asyncio.Event] = {}  # by stream: set at its end
        self._next_stream, self._window = 1, 65_535
        self._has_window = asyncio.Event()
        self._writer: asyncio.StreamWriter

    async def run(self) -> None:
        """Attack until cancelled; a connection that is closed is made again."""
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
                self._open.clear()
                self._next_stream, self._window = 1, 65_535
                self._writer.write(PREFACE + frame(SETTINGS, 0, 0))
                calls = [
                    asyncio.create_task(self._calls(METHODS[n % 2])) for n in range(NUM_STREAMS)
                ]
                try:
                    await self._read(reader)
                finally:
                    for call in calls:
                        call.cancel()
                    self._writer.close()
            self._ends["connection closed"] += 1
            await asyncio.sleep(AGAIN_AFTER_S)

    async def _calls(self, method: str) -> None:
        while True:
            stream, self._next_stream = self._next_stream, self._next_stream + 2
            over = self._open[stream] = asyncio.Event()
            self._writer.write(frame(HEADERS, END_HEADERS, stream, _head(method)))
            await self._send(stream, struct.pack(">BI", 0, ANNOUNCED_BYTES) + bytes(SENT_BYTES))
            while not over.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await over.wait()
                        break
                await self._send(stream, b"\0")
            await asyncio.sleep(AGAIN_AFTER_S)

    async def _send(self, stream: int, data: bytes) -> None:
        """Send data of a call that is open, as the connection's window has room."""
        while self._window < len(data):
            self._has_window.clear()
            await self._has_window.wait()
        if stream in self._open:
            self._window -= len(data)
            self._writer.write(frame(DATA, 0, stream, data))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            high, low, kind, flags, stream = FRAME.unpack(await reader.readexactly(FRAME.size))
            payload = await reader.readexactly((high << 16) + low)
            if kind in (SETTINGS, PING) and not flags & ACK:
                self._writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
            elif kind == WINDOW_UPDATE and stream == 0:
                self._window += struct.unpack(">I", payload)[0]
                self._has_window.set()
            elif kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
                self._end(stream, "reset" if kind == RST_STREAM else "answered")
            elif kind == GOAWAY:
                return

    def _end(self, stream: int, how: str) -> None:
        if (over := self._open.pop(stream, None)) is not None:
            self._ends[how] += 1
            over.set()
            if how == "answered":  # gRPC's servers answer before they have read all
                self._writer.write(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))


async def stall(port: int, ends: Counter[str]) -> None:
    """Keep all calls open until cancelled."""
    await asyncio.gather(*(StalledCalls(port, ends).run() for _ in range(NUM_CONNECTIONS)))


async def crowd(url: str, photos: list[bytes], ends: Counter[str]) -> None:
    """Ask for one member's answer until cancelled."""

    async def client(session: aiohttp.ClientSession, photo: bytes) -> None:
        body, headers = images(photo)
        while True:
            where = f"{url}/v2/models/{CROWD_MEMBER}/infer"
            async with session.post(where, data=body, headers=headers) as answer:
                await answer.read()
            ends[str(answer.status)] += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(client(session, photos[n % len(photos)]) for n in range(NUM_CROWD)))


Attack = Callable[[Counter[str]], Coroutine[Any, Any, None]]


def attacked(attack: Attack, pipe: Connection) -> dict[str, int]:
    """Let an attack go on until something is sent; return how often each end of a call was."""

    async def run() -> Counter[str]:
        ends: Counter[str] = Counter()
        running = asyncio.create_task(attack(ends))
        pipe.send("begun")
        await asyncio.to_thread(pipe.recv)
        running.cancel()
        (error,) = await asyncio.gather(running, return_exceptions=True)
        if not isinstance(error, asyncio.CancelledError):
            raise error
        return ends

    return asyncio.run(run())


def beside_crowds(
    good: GoodLoad, url: str, grpc_port: int, photos: list[bytes], rate: float, seconds: float
) -> dict[str, Any]:
    """Run good load over both protocols, and /readyz, alone and beside each of the attacks."""
    attacks = {
        "stalled_calls": partial(stall, grpc_port),
        "crowd_on_one_member": partial(crowd, url, photos),
    }
    figures = {"alone": asyncio.run(_beside(good, url, grpc_port, rate, seconds))}
    for name, attack in attacks.items():
        with apart(partial(attacked, attack)) as ends:
            figures[name] = asyncio.run(_beside(good, url, grpc_port, rate, seconds))
        figures[name]["hostile_ends"] = dict(sorted(ends.items()))
    return figures


async def _beside(
    good: GoodLoad, url: str, grpc_port: int, rate: float, seconds: float
) -> dict[str, Any]:
    over_http, by_grpc, ready = await asyncio.gather(
        good.run(rate, seconds),
        good.by(partial(over_grpc, grpc_port)).run(rate, seconds),
        _readiness(url, seconds),
    )
    return {"http": over_http, "grpc": by_grpc, "readyz": ready}


async def _readiness(url: str, seconds: float) -> dict[str, Any]:
    """Ask every second; return how many answered 200 in time, and the slowest, in ms."""
    times, num_asked, until = [], 0, time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=READY_WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while time.monotonic() < until:
            num_asked, started = num_asked + 1, time.monotonic()
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        times.append((time.monotonic() - started) * 1e3)
            await asyncio.sleep(READY_EVERY_S)
    slowest_ms = round(max(times, default=0.0), 1)
    return {"asked": num_asked, "ready": len(times), "slowest_ms": slowest_ms}
