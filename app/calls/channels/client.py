"""The client's end: a Gateway's connection to one replica of its node."""

import asyncio
import json
import time
from collections.abc import Callable
from itertools import count

from ray.exceptions import RayActorError

from app.calls.channels.frames import VERSION, FrameKind, FrameProtocol, is_same_user
from app.calls.messages import error_named
from app.calls.replicas import SUSPECT_AFTER_S
from app.errors import NotReadyError
from models.errors import TandemError

PING_AFTER_S = 0.25  # of silence, with calls under way; some take longer
MAX_UNSENT_BYTES = 8 * 2**20  # more than this unsent means that the replica does not read
MAX_NUMBER = 2**32  # call numbers start again from 0 here


class ConnectionLostError(RayActorError):
    """The connection to a replica ended, as it does with its process: the call is made again."""


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
        answer = (
            self._calls.pop(number, None) if kind in (FrameKind.ANSWER, FrameKind.ERROR) else None
        )
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
