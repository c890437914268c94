"""Limits the bytes of the messages that are being received, and cuts slow ones for others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from app.errors import OverloadedError
from app.queueing.uploads import Uploads

# On a cluster HAProxy gives up a Gateway that has taken nothing of a request for 5 s.
WAIT_AT_MOST_S = 2.0


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
