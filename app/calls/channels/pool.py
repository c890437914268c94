"""The channels of a deployment: one to each of its replicas on this node."""

import asyncio
import logging
import random
import socket
import time

from app.calls.channels.client import Channel
from app.calls.channels.frames import address_of
from app.calls.replicas import KnownReplicas, known_replicas, note_silent
from app.queueing.priority import LANES

logger = logging.getLogger("ray.serve")
OPEN_WITHIN_S = 5.0
RECONNECT_AFTER_S = 1.0


class ChannelPool:
    """Connects to the replicas that the deployment's router knows."""

    def __init__(self, app_name: str, deployment_name: str) -> None:
        self._deployment = app_name, deployment_name
        self._known: KnownReplicas | None = None
        self._channels: dict[str, Channel] = {}  # by replica; each has been open
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}  # when to connect to a replica again
        self._logged: set[str] = set()  # replicas without a channel, which is logged once

    def choose(self, num_at_once: int) -> Channel | None:
        """Return the channel with the fewest calls; None to let the handle choose.

        The handle chooses if there are no channels. It also does if some replica has no channel and
        all channels are full: a replica works on ``num_at_once`` calls at a time in each lane.
        """
        known = known_replicas(*self._deployment)
        if known is not self._known:
            self._known = known
            self._retire_all_but(known.near)
        self._connect(known.near)
        there = {
            name: channel
            for name in known.near
            if (channel := self._channels.get(name)) is not None and channel.transport is not None
        }
        for name in known.near:
            note_silent(name, is_silent=name in there and there[name].is_silent)
        usable = [channel for channel in there.values() if channel.can_take_more]
        if not usable:
            return None
        # Ties are broken at random: a replica that cannot answer this call would get it again.
        best = min(usable, key=lambda channel: (channel.num_calls, random.random()))
        are_all_there = len(there) == known.num
        return best if are_all_there or best.num_calls < num_at_once * len(LANES) else None

    def _retire_all_but(self, near: tuple[str, ...]) -> None:
        for name in self._channels.keys() - set(near):
            self._channels.pop(name).retire()
            note_silent(name, is_silent=False)
        self._not_before = {name: at for name, at in self._not_before.items() if name in near}
        self._logged &= set(near)

    def _connect(self, near: tuple[str, ...]) -> None:
        """Start connecting to replicas without a channel."""
        now = time.monotonic()
        for name in near:
            channel = self._channels.get(name)
            is_there = channel is not None and channel.transport is not None
            if is_there or name in self._connecting or now < self._not_before.get(name, now):
                continue
            # This also delays the next attempt if the other end hangs up.
            self._not_before[name] = now + RECONNECT_AFTER_S
            task = asyncio.get_running_loop().create_task(self._connect_to(name))
            self._connecting[name] = task

    async def _connect_to(self, name: str) -> None:
        try:
            self._channels[name] = await connected(address_of(*self._deployment, name))
        except (
            OSError
        ) as error:  # the replica is ending, of another version, or in another container
            if name not in self._logged:
                self._logged.add(name)
                text = "no channel to replica %s of %s, whose calls go through Ray: %s"
                logger.info(text, name, self._deployment[1], error)
        finally:
            del self._connecting[name]


async def connected(address: str) -> Channel:
    """Return a channel whose replica has sent its version.

    Raises:
        OSError: nothing listens there, or the replica is another user's or another version's.

    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:  # uvloop does not accept abstract names
        await loop.sock_connect(sock, address)
        _, channel = await loop.create_unix_connection(Channel, sock=sock)
    except BaseException:
        sock.close()
        raise
    try:
        async with asyncio.timeout(OPEN_WITHIN_S):
            is_open = await channel.opened
    except TimeoutError:
        is_open = False
    if not is_open:
        channel.abort()
        raise ConnectionRefusedError("it is another user's, or of another version")
    return channel
