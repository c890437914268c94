"""Uploads under way: bounds their time, and cancels the slowest when its place is needed."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app.environment import MIB
from app.errors import SlowBodyError

# Nobody takes the place of an upload that has taken less, or less for each MiB that it announced.
SLOW_AFTER_S = 1.0
SLOW_S_PER_MIB = 0.25


@dataclass(slots=True, eq=False)
class Upload:
    """An upload under way; its times are by the loop's clock."""

    timeout: asyncio.Timeout
    num_bytes: int  # that it announced; 0 where nobody needs to know
    slow_from: float
    is_cut: bool = False  # for another, before its time

    @property
    def is_slow(self) -> bool:
        """Whether its place may be given away; so may one whose time is over."""
        now = asyncio.get_running_loop().time()
        return self.timeout.expired() or now >= self.slow_from


class Uploads:
    """Knows them in the order of their arrival."""

    def __init__(self, slow_after_s: float | None = None) -> None:
        self.slow_after_s = SLOW_AFTER_S if slow_after_s is None else slow_after_s
        self.under_way: dict[Upload, None] = {}  # of which none was cut

    @property
    def num(self) -> int:
        return len(self.under_way)

    @property
    def num_bytes(self) -> int:
        return sum(upload.num_bytes for upload in self.under_way)

    @property
    def slowest(self) -> "Upload | None":
        """The upload that is slow first, or has been for the longest time."""
        return min(self.under_way, key=lambda upload: upload.slow_from, default=None)

    @asynccontextmanager
    async def arriving(self, within_s: float = math.inf, num_bytes: int = 0) -> AsyncIterator[None]:
        """Bound the time that an upload takes to arrive in a block, be it a byte a second.

        Raises:
            SlowBodyError: it is not there after ``within_s`` seconds, or was cut for another.

        """
        timeout = asyncio.timeout(within_s if math.isfinite(within_s) else None)
        started = asyncio.get_running_loop().time()
        slow_after_s = max(self.slow_after_s, num_bytes / MIB * SLOW_S_PER_MIB)
        upload = Upload(timeout, num_bytes, started + slow_after_s)
        try:
            async with timeout:
                self.under_way[upload] = None
                try:
                    yield
                finally:
                    self.under_way.pop(upload, None)
        except TimeoutError as error:
            if not timeout.expired():  # another's, of what the block waited for
                raise
            took_s = asyncio.get_running_loop().time() - started
            why = _cut_after(took_s) if upload.is_cut else _late_after(within_s)
            raise SlowBodyError(why) from error

    def cut_slowest(self) -> bool:
        """Cancel the slowest upload if it is slow, so that its place is free in a moment.

        Idle connections could otherwise hold every place. False if no upload is slow.
        """
        upload = self.slowest
        if upload is None or not upload.is_slow:
            return False
        del self.under_way[upload]
        if not upload.timeout.expired():  # else it ends by itself
            upload.is_cut = True
            upload.timeout.reschedule(asyncio.get_running_loop().time())
        return True


def _cut_after(seconds: float) -> str:
    return (
        f"the body was not there after {seconds:.1f} s, and others waited for the place; "
        "try again, with fewer bytes or a faster connection"
    )


def _late_after(seconds: float) -> str:
    return (
        f"the body was not there after {seconds:g} s, the request's time; send fewer bytes at a "
        "time, or allow more time (request_timeout_s, x-request-timeout-seconds)"
    )
