"""Counts the bytes that requests and answers have on the wire, through a relay between them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from protocol_study.payloads import Payloads
from protocol_study.senders import OVER_HTTP, sender
from protocol_study.ways import Address, Way

NUM_REQUESTS = 8


@dataclass
class Counted:
    """Bytes of TCP's payload so far."""

    there: int = 0
    back: int = 0


def wire_bytes(way: Way, address: Address, payloads: Payloads) -> dict[str, float]:
    """Return bytes of an image there and back, without those of opening the connection."""
    return asyncio.run(_measure(way, address, payloads))


async def _measure(way: Way, address: Address, payloads: Payloads) -> dict[str, float]:
    counted = Counted()
    parts = urlsplit(address.url if way.protocol in OVER_HTTP else f"//{address.grpc}")
    async with _relay(parts.hostname or "", parts.port or 0, counted) as port:
        here = replace(address, url=f"http://127.0.0.1:{port}", grpc=f"127.0.0.1:{port}")
        async with sender(way, here, payloads, 1) as send:
            await send(0)  # opens the connection
            first = Counted(counted.there, counted.back)
            for number in range(NUM_REQUESTS):
                await send(number)
            images = NUM_REQUESTS * way.batch
            return {
                "request_bytes": round((counted.there - first.there) / images, 1),
                "answer_bytes": round((counted.back - first.back) / images, 1),
            }


@contextlib.asynccontextmanager
async def _relay(host: str, port: int, counted: Counted) -> AsyncIterator[int]:
    """Listen on a free port of this machine; hand all on to ``host``."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(
            _hand_on(reader, far_writer, counted, "there"),
            _hand_on(far_reader, writer, counted, "back"),
        )

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _hand_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: Counted, way: str
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(2**16):
            setattr(counted, way, getattr(counted, way) + len(data))
            writer.write(data)
            await writer.drain()
    writer.close()
