"""Receives the messages of calls, no more of them at a time than there is memory for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

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
from app.grpc.servicer import Message
from app.queueing.byte_budget import Share
from app.queueing.uploads import Uploads
from app.settings import Settings

# On a cluster HAProxy gives up a Gateway that has taken nothing of a request for 5 s.
WAIT_AT_MOST_S = 2.0
MARGIN_BYTES = MIB  # of a message beside its images: field headers, and what is a little too much
# Of a question about the server, a model or a region: the names in it have some hundred bytes.
SHORT_BYTES = 16 * KIB
SHORT_PLACES = 64  # of the 512 that Serve has for all calls under way
SHORT_WITHIN_S = 2.0
SHORT_IS_SLOW_AFTER_S = 0.1  # then its place may be another's; its bytes fit into one packet


def max_message_bytes(max_body_bytes: int) -> int:
    """Return the most that a message may have: its images, and some bytes more."""
    return max_body_bytes + MARGIN_BYTES


class Receiver:
    """Receives one message of each call.

    What is being received has at most ``max_bytes_in_flight`` in all. Half of that is the small
    messages', in equal parts for all requests that may be under way, so that they wait for nobody;
    the large ones share the other half (:class:`ReceiveRoom`).
    """

    def __init__(self, settings: Settings) -> None:
        self._max_body_bytes = settings.max_body_bytes
        self._max_bytes = max_message_bytes(settings.max_body_bytes)
        half = settings.max_bytes_in_flight // 2
        self._small_bytes = half // settings.max_concurrent_requests
        self._room = ReceiveRoom(half)
        self._short = Uploads(slow_after_s=SHORT_IS_SLOW_AFTER_S)

    async def receive(self, stream: gRPCInputStream[Message], announced: int | None) -> bytes:
        """Return the call's message; until there is room for it the client keeps it.

        One that announces no length is taken for the longest.

        Raises:
            BodyTooLargeError: it is longer than any may be; nothing of it was received.
            OverloadedError, SlowBodyError: there is no room for it, or others waited for its room.
            BadParameterError, ClientGoneError: there is none.

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

    async def receive_short(self, stream: gRPCInputStream[Message], announced: int | None) -> bytes:
        """Return the message of a question, which nobody admits: it has a place of its own.

        A client that never sends the rest of its message would otherwise hold one of Serve's
        places, which all other requests need, for as long as it likes.

        Raises:
            BodyTooLargeError: it is longer than any question.
            OverloadedError: too many are awaited, and all have just begun.
            SlowBodyError: it was not there in time.
            BadParameterError, ClientGoneError: there is none.

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
    """Bytes of memory that messages take while they arrive; first come, first served.

    Unlike a :class:`~app.queueing.byte_budget.ByteBudget` it counts what a message may come to, not
    what has arrived: nobody sees how far grpcio is with one. So a place must not be held for ever.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.num_taken = limit, 0
        self._turn, self._someone_left = asyncio.Lock(), asyncio.Event()
        self._uploads = Uploads()

    @asynccontextmanager
    async def taken(self, num_bytes: int) -> AsyncIterator[None]:
        """Take ``num_bytes`` while the block runs. One alone may take more than there are.

        Raises:
            OverloadedError: others held them for too long.
            SlowBodyError: the block took long, and others waited.

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
        """Return when a message has left, or the slowest was cut."""
        slowest = self._uploads.slowest
        if self._uploads.num_bytes + num_bytes <= self._limit:
            slowest = None  # who was cut already leaves room enough
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
