"""Limits the bytes of the messages that are being received, and cuts slow ones for others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from app.environment import MIB
from app.errors import OverloadedError, SlowBodyError

# Whoever is waited for is cut after this long for each MiB, and no sooner than after SLOW_AFTER_S.
SLOW_S_PER_MIB = 0.25
SLOW_AFTER_S = 1.0
# On a cluster HAProxy gives up a Gateway that has taken nothing of a request for 5 s.
WAIT_AT_MOST_S = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Of a message that is being received."""

    num_bytes: int
    slow_from: float  # on the loop's clock
    timer: asyncio.Timeout


class ReceiveRoom:
    """Bytes of memory that messages take while they arrive; first come, first served.

    Unlike a :class:`~app.queueing.byte_budget.ByteBudget` it counts what a message may come to, not
    what has arrived: nobody sees how far grpcio is with one. So a place must not be held for ever.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.num_taken = limit, 0
        self._turn, self._someone_left = asyncio.Lock(), asyncio.Event()
        # In the order of their beginning; whoever was cut leaves in a moment.
        self._staying: dict[_Place, None] = {}

    @asynccontextmanager
    async def taken(self, num_bytes: int) -> AsyncIterator[None]:
        """Take ``num_bytes`` while the block runs. One alone may take more than there are.

        Raises:
            OverloadedError: others held them for too long.
            SlowBodyError: the block took long, and others waited.

        """
        await self._take(num_bytes)
        started = asyncio.get_running_loop().time()
        slow_after_s = max(SLOW_AFTER_S, num_bytes / MIB * SLOW_S_PER_MIB)
        place = _Place(num_bytes, started + slow_after_s, asyncio.timeout(None))
        try:
            async with place.timer:
                self._staying[place] = None
                yield
        except TimeoutError as error:
            took_s = asyncio.get_running_loop().time() - started
            raise SlowBodyError(
                f"the message was not there after {took_s:.1f} s, and others waited for its "
                "place; try again, with fewer bytes or a faster connection"
            ) from error
        finally:
            self._staying.pop(place, None)
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
        """Return when one has left, or when the slowest was told to."""
        slowest = min(self._staying, key=lambda place: place.slow_from, default=None)
        num_staying = sum(place.num_bytes for place in self._staying)
        if num_staying + num_bytes <= self._limit:
            slowest = None  # who was cut already leaves room enough
        self._someone_left.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(slowest.slow_from if slowest else None):
                await self._someone_left.wait()
            return
        if slowest in self._staying:
            del self._staying[slowest]
            slowest.timer.reschedule(asyncio.get_running_loop().time())
