"""Makes any client a slow one: a relay that lets its first bytes pass, and then next to nothing."""

import asyncio
import math
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 65536


class SlowRelay:
    """Stands between clients and a port of this machine; ``port`` is its own.

    Of what a connection's client sends ``num_fast_bytes`` pass at once, then one byte each
    ``every_s``. What it is answered passes as it comes.
    """

    port = 0

    def __init__(self, target: int, num_fast_bytes: float, every_s: float) -> None:
        self._target, self._num_fast_bytes, self._every_s = target, num_fast_bytes, every_s
        self._relays: set[asyncio.Task[None]] = set()
        self.num_passed = 0  # bytes, of all clients

    def begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.create_task(self._relay(reader, writer))
        relay.add_done_callback(lambda _: writer.close())  # also of one that never began
        self._relays.add(relay)

    async def end(self) -> None:
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        sending = asyncio.create_task(self._trickle(reader, back))
        try:
            with suppress(OSError):
                while piece := await there.read(CHUNK_BYTES):
                    writer.write(piece)
                    await writer.drain()
        finally:
            sending.cancel()
            back.close()

    async def _trickle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_fast = self._num_fast_bytes
        with suppress(OSError):
            while piece := await reader.read(int(min(CHUNK_BYTES, num_fast)) or 1):
                num_fast -= min(num_fast, len(piece))
                self.num_passed += len(piece)
                writer.write(piece)
                await writer.drain()
                if not num_fast:
                    await asyncio.sleep(self._every_s)


@asynccontextmanager
async def slow_relay(target, num_fast_bytes=math.inf, every_s=1.0):
    """Listen in front of ``target``; without a number of bytes the relay only counts them."""
    relay = SlowRelay(target, num_fast_bytes, every_s)
    server = await asyncio.start_server(relay.begin, "127.0.0.1", 0, backlog=1024)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        await relay.end()
