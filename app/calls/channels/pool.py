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
    """Connects to the replicas that the deployment's router has been told of."""

    def __init__(self, app_name: str, deployment_name: str) -> None:
        self._deployment = app_name, deployment_name
        self._known: KnownReplicas | None = None
        self._channels: dict[str, Channel] = {}  # by replica; each has been open
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}  # to connect to a replica
        self._told: set[str] = set()  # replicas of which the log has said that there is none

    def choose(self, num_at_once: int) -> Channel | None:
        """Return the channel with the fewest calls; None if the handle is to choose.

        It is to choose if no replica can be reached, or if one that cannot may have less to do:
        each that can has as many calls as it works on at a time, ``num_at_once`` in each lane.
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
        # Of equals not always the same one: some that cannot answer this call are asked again.
        best = min(usable, key=lambda channel: (channel.num_calls, random.random()))
        are_all_there = len(there) == known.num
        return best if are_all_there or best.num_calls < num_at_once * len(LANES) else None

    def _retire_all_but(self, near: tuple[str, ...]) -> None:
        for name in self._channels.keys() - set(near):
            self._channels.pop(name).retire()
            note_silent(name, is_silent=False)
        self._not_before = {name: at for name, at in self._not_before.items() if name in near}
        self._told &= set(near)

    def _connect(self, near: tuple[str, ...]) -> None:
        """Begin to connect to those that there is no connection to."""
        now = time.monotonic()
        for name in near:
            channel = self._channels.get(name)
            is_there = channel is not None and channel.transport is not None
            if is_there or name in self._connecting or now < self._not_before.get(name, now):
                continue
            # Not again at once either if the other end hangs up.
            self._not_before[name] = now + RECONNECT_AFTER_S
            task = asyncio.get_running_loop().create_task(self._connect_to(name))
            self._connecting[name] = task

    async def _connect_to(self, name: str) -> None:
        try:
            self._channels[name] = await connected(address_of(*self._deployment, name))
        except OSError as error:  # it ends, is of another version, or in another container
            if name not in self._told:
                self._told.add(name)
                text = "no channel to replica %s of %s, whose calls go through Ray: %s"
                logger.info(text, name, self._deployment[1], error)
        finally:
            del self._connecting[name]


async def connected(address: str) -> Channel:
    """Return a channel to a replica that has said who it is.

    Raises:
        OSError: nobody listens there, another user does, or another version of this program.

    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:  # uvloop itself takes no abstract name
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
