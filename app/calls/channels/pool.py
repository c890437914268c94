"""The channels of a deployment: one to each of its replicas on this node."""

import asyncio
import socket
import time

from app.calls.channels.address import address_of
from app.calls.channels.client import Channel
from app.calls.known_replicas import (
    KnownReplicas,
    forget_channel,
    known_replicas,
    note_channel,
)

RECONNECT_AFTER_S = 1.0
MAX_UNSENT_BYTES = 8 * 2**20  # with more of them a replica does not read what it is sent


class ChannelPool:
    """Connects to the replicas that the deployment's router has been told of."""

    def __init__(self, app_name: str, deployment_name: str) -> None:
        self._deployment = app_name, deployment_name
        self._known: KnownReplicas | None = None
        self._channels: dict[str, Channel] = {}  # by replica
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}  # of replicas that could not be reached

    def choose(self, num_at_once: int) -> Channel | None:
        """Return the channel with the fewest calls; None if the handle is to choose.

        It is to choose if no replica here can be reached, or if those elsewhere may have less to
        do: each here has ``num_at_once`` calls, as many as it works on at a time.
        """
        known = known_replicas(*self._deployment)
        if known is not self._known:
            self._known = known
            self._retire_all_but(known.near)
        self._connect(known.near)
        best: Channel | None = None
        for name in known.near:
            if (channel := self._channels.get(name)) is None:
                continue
            is_silent = channel.check_silence()
            note_channel(name, channel.num_calls, is_silent=is_silent)
            if is_silent or not _can_take(channel):
                continue
            if best is None or channel.num_calls < best.num_calls:
                best = channel
        is_only_here = known.num == len(known.near)
        return best if best is not None and (is_only_here or best.num_calls < num_at_once) else None

    def _retire_all_but(self, near: tuple[str, ...]) -> None:
        for name in self._channels.keys() - set(near):
            self._channels.pop(name).retire()
            forget_channel(name)
        self._not_before = {name: at for name, at in self._not_before.items() if name in near}

    def _connect(self, near: tuple[str, ...]) -> None:
        """Begin to connect to those that there is no connection to."""
        now = time.monotonic()
        for name in near:
            channel = self._channels.get(name)
            is_there = channel is not None and channel.transport is not None
            if is_there or name in self._connecting or now < self._not_before.get(name, now):
                continue
            task = asyncio.get_running_loop().create_task(self._connect_to(name))
            self._connecting[name] = task

    async def _connect_to(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # Not again at once either if the other end hangs up.
        self._not_before[name] = time.monotonic() + RECONNECT_AFTER_S
        try:  # uvloop itself takes no abstract name
            await loop.sock_connect(sock, address_of(*self._deployment, name))
            _, self._channels[name] = await loop.create_unix_connection(Channel, sock=sock)
        except OSError:  # it ends, is of another version, or in another container: calls go by Ray
            sock.close()
        finally:
            del self._connecting[name]


def _can_take(channel: Channel) -> bool:
    if not channel.is_open or channel.transport is None:
        return False
    return channel.transport.get_write_buffer_size() < MAX_UNSENT_BYTES
