"""Receives the messages of calls, with a limit on the memory of messages under way."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from ray.serve.grpc_util import gRPCInputStream

from app.environment import KIB, MIB
from app.errors import (
    IN_A_SECOND,
    BadParameterError,
    BodyTooLargeError,
    ClientGoneError,
    OverloadedError,
    SlowBodyError,
)
from app.grpc.call import Message
from app.oip.inference import LONG_BYTES
from app.queueing.admission import Share, Uploads
from app.setting_groups import LimitSettings

Parsed = TypeVar("Parsed")
# On a cluster HAProxy gives up on a Gateway that reads nothing of a request for 5 s.
WAIT_AT_MOST_S = 2.0
MARGIN_BYTES = MIB  # for a message's field headers, and some tolerance
GRPC_MOST_BYTES = 2**31 - 1  # of its option, a C int
# For questions about the server, a model or a region, whose names have some hundred bytes.
SHORT_BYTES = 16 * KIB
SHORT_PLACES = 64  # of the 512 places that Serve has for all calls under way
SHORT_WITHIN_S = 2.0
SHORT_IS_SLOW_AFTER_S = 0.1  # then it may lose its place; its bytes fit into one packet


def max_message_bytes(max_body_bytes: int) -> int:
    """Return the limit of a message: its images, and some bytes for headers."""
    return min(max_body_bytes + MARGIN_BYTES, GRPC_MOST_BYTES)


class Receiver:
    """Receives one message of each call.

    All messages being received have at most ``max_bytes_in_flight``. Half of that is for small
    messages, divided equally among all requests that may be under way, so small messages never
    wait. Large ones share the other half (:class:`ReceiveRoom`).
    """

    def __init__(self, limits: LimitSettings) -> None:
        self._max_body_bytes = limits.max_body_bytes
        self._max_bytes = max_message_bytes(limits.max_body_bytes)
        half = limits.max_bytes_in_flight // 2
        self._small_bytes = half // limits.max_concurrent_requests
        self._room = ReceiveRoom(half)
        self._short = Uploads(slow_after_s=SHORT_IS_SLOW_AFTER_S)
        self._parsing = asyncio.Lock()

    async def receive(self, stream: gRPCInputStream[Message], announced: int | None) -> bytes:
        """Return the call's message; until there is memory for it the client keeps it.

        A call that announces no length reserves memory for the longest message.

        Raises:
            BodyTooLargeError: the message is over the limit; nothing was received.
            OverloadedError: there is no memory for it.
            SlowBodyError: it arrived slowly while others waited for its memory.
            BadParameterError: the call has no message.
            ClientGoneError: the client hung up before.
        """
        num_bytes = self._max_bytes if announced is None else announced
        if num_bytes > self._max_bytes:
            raise BodyTooLargeError(
                f"the message has {num_bytes} bytes, the limit is {self._max_body_bytes}; "
                "send smaller ones (1,000 pixels a side are plenty) or fewer images per request"
            )
        if num_bytes <= self._small_bytes:
            return await _first(stream)
        async with self._room.taken(num_bytes):
            return await _first(stream)

    async def receive_into(
        self, share: Share, stream: gRPCInputStream[Message], announced: int | None
    ) -> bytes:
        """Return the call's message as :meth:`receive` does, and count it in ``share``."""
        share.expect(announced or 0)
        message = await self.receive(stream, announced)
        share.grow(len(message))
        return message

    async def read(self, message: bytes, parse: Callable[[bytes], Parsed]) -> Parsed:
        """Return ``parse(message)``; long messages are parsed in turn, on a thread.

        Protobuf lets no other thread run while it copies, for some 10 ms of 20 MB.
        """
        if len(message) <= LONG_BYTES:
            return parse(message)
        async with self._parsing:
            return await asyncio.to_thread(parse, message)

    async def receive_short(self, stream: gRPCInputStream[Message], announced: int | None) -> bytes:
        """Read a metadata request, whose places are limited apart from admission.

        Otherwise a client that never sends the rest of its message would hold one of Serve's places
        for all requests, for any time.

        Raises:
            BodyTooLargeError: the message is longer than any metadata request.
            OverloadedError: too many of them are being received, all just begun.
            SlowBodyError: the message did not arrive in time.
            BadParameterError, ClientGoneError: the call has no message.
        """
        _check_short(announced or 0)
        if self._short.num >= SHORT_PLACES and not self._short.cut_slowest():
            raise OverloadedError(f"{SHORT_PLACES} messages are awaited, the limit; {IN_A_SECOND}")
        try:
            async with self._short.arriving(SHORT_WITHIN_S):
                message = await self.receive(stream, announced)
        except SlowBodyError as error:
            raise SlowBodyError(
                f"the message was not there in time ({SHORT_WITHIN_S:g} s, and less where others "
                "wait); send it in one piece"
            ) from error
        _check_short(len(message))
        return message


class ReceiveRoom:
    """Memory for messages while they arrive, in bytes; first come, first served.

    It counts the length that a message may reach, unlike
    :class:`~app.queueing.admission.ByteBudget`, since grpcio does not show how much has arrived.
    So slow messages must be cut off.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.num_taken = limit, 0
        self._turn, self._someone_left = asyncio.Lock(), asyncio.Event()
        self._uploads = Uploads()

    @asynccontextmanager
    async def taken(self, num_bytes: int) -> AsyncIterator[None]:
        """Reserve ``num_bytes`` during the block; a single call may exceed the limit.

        Raises:
            OverloadedError: other calls held the bytes for too long.
            SlowBodyError: the block took long while others waited.
        """
        await self._take(num_bytes)
        try:
            async with self._uploads.arriving(num_bytes=num_bytes):
                yield
        finally:
            self.num_taken -= num_bytes
            self._someone_left.set()

    async def _take(self, num_bytes: int) -> None:
        try:
            async with asyncio.timeout(WAIT_AT_MOST_S), self._turn:
                while self.num_taken and self.num_taken + num_bytes > self._limit:
                    await self._wait_or_cut(num_bytes)
                self.num_taken += num_bytes
        except TimeoutError as error:
            raise OverloadedError(
                f"the messages that are being received may have {self.num_taken} bytes, of "
                f"{self._limit} for all together, and this one {num_bytes} more; try again in 1 s"
            ) from error

    async def _wait_or_cut(self, num_bytes: int) -> None:
        """Return when a message has left, or the slowest one was cut off."""
        slowest = self._uploads.slowest
        if self._uploads.num_bytes + num_bytes <= self._limit:
            slowest = None  # one was cut off already, which frees enough
        self._someone_left.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(slowest.slow_from if slowest else None):
                await self._someone_left.wait()
            return
        self._uploads.cut_slowest()


def _check_short(num_bytes: int) -> None:
    if num_bytes > SHORT_BYTES:
        raise BodyTooLargeError(
            f"the message has {num_bytes} bytes, the limit of this method is {SHORT_BYTES}; send "
            "images to ModelInfer"
        )


async def _first(stream: gRPCInputStream[Message]) -> bytes:
    async for message in stream:
        return message.take()
    if stream.is_cancelled():
        raise ClientGoneError("the client hung up before its message was there")
    raise BadParameterError("the call has no message; send one")
