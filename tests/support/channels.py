"""Replicas' ends of channels and the pool that connects to them, in one process."""

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Awaitable, Callable

from app.serve import channels

APP = "of_channels"
WITHIN_S = 30.0
_numbers = itertools.count()


class Node:
    """A deployment of which some replicas are on this node."""

    def __init__(self) -> None:
        self.name = f"stage{next(_numbers)}"
        self.pool = channels.ChannelPool(APP, self.name)
        self.ids: list[str] = []
        self._servers: list[asyncio.Server] = []
        self.num_elsewhere = 0

    async def add(self, answer: Callable[[bytes], Awaitable[bytes]]) -> channels.ChannelServer:
        """Start a replica, and tell of it as the router does."""
        self.ids.append(f"r{next(_numbers)}-{time.time_ns()}")
        server = channels.ChannelServer(channels.address_of(APP, self.name, self.ids[-1]), answer)
        await server.start()
        assert server._server is not None
        self._servers.append(server._server)
        self.tell()
        return server

    def tell(self) -> None:
        known = channels.KnownReplicas(len(self.ids) + self.num_elsewhere, tuple(self.ids))
        channels.note_replicas(APP, self.name, known)

    async def channel(self, num_at_once: int = 1) -> channels.Channel:
        """Return the pool's choice once it has connected."""
        await self.connected()
        await until(lambda: self.pool.choose(num_at_once) is not None)
        found = self.pool.choose(num_at_once)
        assert found is not None
        return found

    async def connected(self) -> None:
        def is_done() -> bool:
            self.pool.choose(1)
            return self.pool._channels.keys() == set(self.ids)

        await until(is_done)

    async def close(self) -> None:
        await until(lambda: not self.pool._connecting)  # or they are open a moment later
        for channel in self.pool._channels.values():
            channel.abort()
        for server in self._servers:
            server.close()
        await asyncio.sleep(0.01)  # the other ends see it


@contextlib.asynccontextmanager
async def listener(talk):
    """Listen as a replica of another kind would, and yield the address."""

    async def told(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        finally:
            writer.close()

    name = channels.address_of(APP, "another", f"r{next(_numbers)}-{time.time_ns()}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(name)
    server = await asyncio.start_unix_server(told, sock=sock)
    try:
        yield name
    finally:
        server.close()
        await asyncio.sleep(0.01)


async def echo(message: bytes) -> bytes:
    return message[::-1]


class Waiting:
    """Answers when it is told to; notes what it was asked, and who was cancelled."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.cancelled: list[bytes] = []
        self.go_on = asyncio.Event()

    async def __call__(self, message: bytes) -> bytes:
        self.asked.append(message)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.append(message)
            raise
        return message


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.001)
