"""Channels: Unix-domain sockets between the Gateways and the replicas of one node.

Both ends send frames: a head of 16 bytes, little-endian (kind, number of the call, length of the
payload), and the payload. Payloads of calls and answers are messages of
:mod:`app.serve.shared_calls`. A Gateway has a :class:`ChannelPool` for each remote stage, and a
:class:`Channel` to each of its replicas here; the replica has a :class:`ChannelServer`.
"""

import asyncio
import json
import logging
import os
import random
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from enum import IntEnum
from itertools import count
from typing import NamedTuple, cast

from ray.exceptions import RayActorError

from app.errors import IN_A_SECOND, NotReadyError, OverloadedError
from app.queueing.scheduler import LANES
from app.serve.shared_calls import error_named, named_error
from models.errors import TandemError

SUSPECT_AFTER_S = 1.0  # without an answer
PING_AFTER_S = 0.25  # of silence, with calls under way; some take longer
MAX_UNSENT_BYTES = 8 * 2**20  # more than this unsent means that the replica does not read
MAX_NUMBER = 2**32  # call numbers start again from 0 here
_silent: set[str] = set()  # replicas
IS_THERE = hasattr(socket, "SO_PEERCRED")  # Linux's; elsewhere all calls go through Ray
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
MAX_NAME = 107  # bytes, after the leading zero
FRAME_HEAD = struct.Struct("<BxxxIQ")
VERSION = b"TnS1"  # the payload of the server's first frame; the digit is the version
MAX_PAYLOAD_BYTES = 2**30  # more than any call or answer has; a longer one is not ours
logger = logging.getLogger("ray.serve")
OPEN_WITHIN_S = 5.0
RECONNECT_AFTER_S = 1.0
Answer = Callable[[bytes], Awaitable[bytes]]  # from a call's message to the answer's
MAX_CALLS = 512  # under way; Gateways send a few for each core
DRAIN_POLL_S = 0.05


class KnownReplicas(NamedTuple):
    """The replicas of a deployment, as its router and the channels know them.

    Serve updates a router on the router's own thread; calls are made on another. Values that both
    use are replaced as a whole, so no lock is needed.
    """

    num: int
    near: tuple[str, ...] = ()  # the unique ids of the replicas on this process's node


_known: dict[tuple[str, str], KnownReplicas] = {}
_BEFORE_ANY = KnownReplicas(1)


def note_replicas(app_name: str, deployment_name: str, known: KnownReplicas) -> None:
    """Store the replicas that a router received."""
    _known[app_name, deployment_name] = known


def known_replicas(app_name: str, deployment_name: str) -> KnownReplicas:
    """Return the last stored replicas; before that, one replica on an unknown node."""
    return _known.get((app_name, deployment_name), _BEFORE_ANY)


def note_silent(replica_id: str, *, is_silent: bool) -> None:
    """Note whether a replica with calls on its channel has stopped responding."""
    (_silent.add if is_silent else _silent.discard)(replica_id)


def is_silent(replica_id: str) -> bool:
    """Whether a replica does not respond on its channel."""
    return replica_id in _silent


class ConnectionLostError(RayActorError):
    """The connection to a replica ended, as it does with its process: the call is made again."""


class FrameKind(IntEnum):
    """The kinds of frames."""

    HELLO = 0  # server to client, once
    CALL = 1  # client to server; the server answers with the same number
    ANSWER = 2
    ERROR = 3  # for the call as a whole: JSON with the class's name and arguments
    CANCEL = 4  # client to server: nobody waits for the answer
    PING = 5  # client to server, answered at once
    PONG = 6


class FrameProtocol(asyncio.Protocol, ABC):
    """Reads and writes frames; one over ``MAX_PAYLOAD_BYTES`` ends the connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()  # received, and not yet a whole frame
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    @abstractmethod
    def frame_received(self, kind: int, number: int, payload: bytes) -> None:
        """Handle a frame that has arrived whole; the two ends of a channel do so differently."""

    def send(self, kind: FrameKind, number: int = 0, payload: bytes = b"") -> None:
        """Send a frame; does nothing if the connection has ended."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.writelines((FRAME_HEAD.pack(kind, number, len(payload)), payload))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= FRAME_HEAD.size and self.transport is not None:
            kind, number, length = FRAME_HEAD.unpack_from(self._buffer)
            if length > MAX_PAYLOAD_BYTES:
                self.abort()
                return
            if len(self._buffer) < (end := FRAME_HEAD.size + length):
                return
            with memoryview(self._buffer) as view:  # a slice of the buffer itself would be a copy
                payload = bytes(view[FRAME_HEAD.size : end])
            del self._buffer[:end]
            self.frame_received(kind, number, payload)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
            self.transport = None


class Channel(FrameProtocol):
    """A connection to a replica; all methods are called on its event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = count(1)
        self._heard_at = 0.0  # or when the first call was sent
        self._pinged_at: float | None = None  # a ping without an answer yet
        self._look: asyncio.TimerHandle | None = None
        self._is_retired = False
        # Set once both ends have exchanged versions; False if these differ.
        self.opened: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def is_silent(self) -> bool:
        """Whether the replica has not answered a ping for ``SUSPECT_AFTER_S``.

        A replica with calls is pinged after ``PING_AFTER_S`` of silence. It answers while it
        computes.
        """
        return self._pinged_at is not None and self._clock() - self._pinged_at > SUSPECT_AFTER_S

    @property
    def can_take_more(self) -> bool:
        if self.is_silent or self.transport is None:
            return False
        return self.transport.get_write_buffer_size() < MAX_UNSENT_BYTES

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the connection if the other process has another user; asyncio calls this."""
        super().connection_made(transport)
        if not is_same_user(transport):
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the calls under way; asyncio calls this."""
        self.transport, self._pinged_at = None, None
        if self._look is not None:
            self._look.cancel()
        if not self.opened.done():
            self.opened.set_result(False)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ConnectionLostError())
        self._calls.clear()

    def retire(self) -> None:
        """Close the connection once the calls under way have been answered."""
        self._is_retired = True
        self._close_if_done()

    async def call(self, message: bytes) -> bytes:
        """Return the answer, or raise the replica's error, or :class:`ConnectionLostError`."""
        if self.transport is None:
            raise ConnectionLostError
        number = next(self._numbers) % MAX_NUMBER
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self._calls:
            self._heard_at = self._clock()
        self._calls[number] = answer
        self._watch()
        self.send(FrameKind.CALL, number, message)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._calls.pop(number, None) is not None:
                self.send(FrameKind.CANCEL, number)
            raise
        finally:
            self._close_if_done()

    def frame_received(self, kind: int, number: int, payload: bytes) -> None:
        """Handle a frame from the replica; frames of calls that nobody awaits are dropped."""
        self._heard_at, self._pinged_at = self._clock(), None
        is_end = kind in (FrameKind.ANSWER, FrameKind.ERROR)
        answer = self._calls.pop(number, None) if is_end else None
        if kind == FrameKind.HELLO and not self.opened.done():
            self.opened.set_result(payload == VERSION)  # False: another version
        elif answer is not None and not answer.done():
            if kind == FrameKind.ANSWER:
                answer.set_result(payload)
            else:
                answer.set_exception(_error_of(payload))

    def _watch(self) -> None:
        """Check for silence now and then, as long as calls are under way."""
        if self._look is None:
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(PING_AFTER_S, self._ask_if_it_is_there)

    def _ask_if_it_is_there(self) -> None:
        self._look = None
        if not self._calls:
            return
        now = self._clock()
        if self._pinged_at is None and now - self._heard_at >= PING_AFTER_S:
            self._pinged_at = now
            self.send(FrameKind.PING)
        self._watch()

    def _close_if_done(self) -> None:
        if self._is_retired and not self._calls and self.transport is not None:
            self.transport.close()


def _error_of(payload: bytes) -> TandemError:
    try:
        return error_named(*json.loads(payload))
    except (ValueError, TypeError) as error:
        return NotReadyError(f"a stage of the graph failed ({error}); try again")


def address_of(app_name: str, deployment_name: str, replica_id: str) -> str:
    """Return the address; ``replica_id`` is Serve's, drawn anew for each replica."""
    name = f"tandem/{replica_id}/{app_name}/{deployment_name}".encode()[:MAX_NAME]
    return "\0" + name.decode(errors="ignore")


def is_same_user(transport: asyncio.BaseTransport) -> bool:
    """Whether the other end of a connection is a process of this process's user."""
    sock = transport.get_extra_info("socket")
    try:
        with socket.socket(fileno=os.dup(sock.fileno())) as own:  # uvloop's has no getsockopt
            credentials = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    except OSError:  # no file descriptor is left
        return False
    _, uid, _ = CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())


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
        except OSError as error:  # the replica ends, has another version or is in a container
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


class ChannelServer:
    """Listens at ``address`` and answers calls with ``answer``."""

    def __init__(self, address: str, answer: Answer) -> None:
        self._address, self._answer = address, answer
        self._server: asyncio.Server | None = None
        self.num_calls = 0  # calls under way

    async def start(self) -> None:
        """Listen, on the running loop; raise OSError if another process has the address."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:  # uvloop does not accept abstract names
            sock.bind(self._address)
        except BaseException:
            sock.close()
            raise
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Connection(self, self._answer), sock=sock
        )

    async def drain(self) -> None:
        """Stop listening, and wait until the calls under way have been answered."""
        if self._server is not None:
            self._server.close()
        while self.num_calls:
            await asyncio.sleep(DRAIN_POLL_S)


class _Connection(FrameProtocol):
    """The connection of one Gateway."""

    def __init__(self, server: ChannelServer, answer: Answer) -> None:
        super().__init__()
        self._server, self._answer = server, answer
        self._calls: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send our version, or close if the other process has another user; asyncio calls this."""
        super().connection_made(transport)
        if is_same_user(transport):
            self.send(FrameKind.HELLO, payload=VERSION)
        else:
            logger.warning("a process of another user connected, and was hung up on")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the calls of the Gateway that is gone; asyncio calls this."""
        self.transport = None
        for task in self._calls.values():
            task.cancel()

    def frame_received(self, kind: int, number: int, payload: bytes) -> None:
        """Start or cancel a call, or answer a ping; close on any other frame."""
        if kind == FrameKind.CALL and number not in self._calls:
            self._begin(number, payload)
        elif kind == FrameKind.CANCEL:
            if (task := self._calls.get(number)) is not None:
                task.cancel()
        elif kind == FrameKind.PING:
            self.send(FrameKind.PONG)
        else:
            self.abort()

    def _begin(self, number: int, message: bytes) -> None:
        if self._server.num_calls >= MAX_CALLS:
            text = f"{MAX_CALLS} calls are under way, as many as may be; {IN_A_SECOND}"
            self._fail(number, OverloadedError(text))
            return
        self._server.num_calls += 1
        task = asyncio.get_running_loop().create_task(self._run(number, message))
        self._calls[number] = task
        task.add_done_callback(lambda done: self._ended(number, done))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        self._server.num_calls -= 1
        del self._calls[number]
        if task.cancelled():  # if the replica cancelled the call, the caller still waits
            self._fail(number, NotReadyError("the call was ended on its way; try again"))

    async def _run(self, number: int, message: bytes) -> None:
        try:
            answer = await self._answer(message)
        except Exception as error:
            if not isinstance(error, TandemError):
                logger.error("a call failed: %r", error, exc_info=error)
            self._fail(number, error)
        else:
            self.send(FrameKind.ANSWER, number, answer)

    def _fail(self, number: int, error: Exception) -> None:
        self.send(FrameKind.ERROR, number, json.dumps(named_error(error), default=str).encode())
