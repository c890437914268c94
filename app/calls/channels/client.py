"""The client's end: a Gateway's connection to one replica of its node."""

import asyncio
import json
import time
from collections.abc import Callable
from itertools import count

from ray.exceptions import RayActorError

from app.calls.answer_messages import error_named
from app.calls.channels.address import is_same_user
from app.calls.channels.frames import VERSION, FrameProtocol, Kind
from app.calls.failure_detector import SUSPECT_AFTER_S

PING_AFTER_S = 0.25  # without a word, with calls under way: some take longer
MAX_NUMBER = 2**32  # of calls, after which they begin anew


class ConnectionLostError(RayActorError):
    """The connection to a replica ended, as it does with its process: the call is made again."""


class Channel(FrameProtocol):
    """A connection to a replica; all methods are called on its event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = count(1)
        self._waits_since: float | None = None  # for a frame; None: no call is under way
        self._pinged_at: float | None = None  # without an answer
        self._is_retired = False
        self.is_open = False  # both ends know each other

    @property
    def num_calls(self) -> int:
        """Calls under way."""
        return len(self._calls)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hang up on another user's process; asyncio calls this."""
        super().connection_made(transport)
        if not is_same_user(transport):
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what is under way; asyncio calls this."""
        self.transport, self.is_open = None, False
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ConnectionLostError())
        self._calls.clear()

    def check_silence(self) -> bool:
        """Return whether the replica was asked for a sign of life ``SUSPECT_AFTER_S`` ago.

        One that has calls is asked when it has said nothing for ``PING_AFTER_S``; it answers
        whatever it computes, and counts as silent until it has.
        """
        now = self._clock()
        if self._pinged_at is not None:
            return now - self._pinged_at > SUSPECT_AFTER_S
        if self._waits_since is not None and now - self._waits_since > PING_AFTER_S:
            self._pinged_at = now
            self.send(Kind.PING)
        return False

    def retire(self) -> None:
        """Close the connection once what is under way has been answered."""
        self._is_retired = True
        self._close_if_done()

    async def call(self, message: bytes) -> bytes:
        """Return the answer to a message.

        Raises:
            TandemError: what the replica raised.
            ConnectionLostError: the connection ended before the answer.

        """
        if not self.is_open:
            raise ConnectionLostError
        number = next(self._numbers) % MAX_NUMBER
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        if self._waits_since is None:
            self._waits_since = self._clock()
        self.send(Kind.CALL, number, message)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._calls.pop(number, None) is not None:
                self.send(Kind.CANCEL, number)
            raise
        finally:
            self._close_if_done()

    def frame_received(self, kind: int, number: int, payload: bytes) -> None:
        """Take what the replica says; what belongs to no call that somebody waits for goes."""
        answer = self._calls.pop(number, None) if kind in (Kind.ANSWER, Kind.ERROR) else None
        self._pinged_at = None
        self._waits_since = self._clock() if self._calls else None
        if kind == Kind.HELLO:
            self.is_open = payload == VERSION
            if not self.is_open:  # a replica of another version of this program
                self.abort()
        elif answer is not None and not answer.done():
            if kind == Kind.ANSWER:
                answer.set_result(payload)
            else:
                answer.set_exception(error_named(*json.loads(payload)))

    def _close_if_done(self) -> None:
        if self._is_retired and not self._calls and self.transport is not None:
            self.transport.close()
