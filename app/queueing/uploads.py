"""Limits the time of uploads, and cancels the slowest upload when its place is needed."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app.environment import MIB
from app.errors import SlowBodyError

# An upload keeps its place for this time, or for this time per MiB that it announced.
SLOW_AFTER_S = 1.0
SLOW_S_PER_MIB = 0.25


@dataclass(slots=True, eq=False)
class Upload:
    """An upload under way; times are by the loop's clock."""

    timeout: asyncio.Timeout
    num_bytes: int  # announced; 0 if only the number of uploads matters
    slow_from: float
    is_cut: bool = False  # cancelled to make room for another

    @property
    def is_slow(self) -> bool:
        """Whether its place may go to another: it is slow, or its time is over."""
        now = asyncio.get_running_loop().time()
        return self.timeout.expired() or now >= self.slow_from


class Uploads:
    """The uploads under way, in the order of arrival."""

    def __init__(self, slow_after_s: float | None = None) -> None:
        self.slow_after_s = SLOW_AFTER_S if slow_after_s is None else slow_after_s
        self.under_way: dict[Upload, None] = {}  # without those that were cancelled

    @property
    def num(self) -> int:
        return len(self.under_way)

    @property
    def num_bytes(self) -> int:
        return sum(upload.num_bytes for upload in self.under_way)

    @property
    def slowest(self) -> "Upload | None":
        """The upload that counts as slow first, or has for the longest time."""
        return min(self.under_way, key=lambda upload: upload.slow_from, default=None)

    @asynccontextmanager
    async def arriving(self, within_s: float = math.inf, num_bytes: int = 0) -> AsyncIterator[None]:
        """Limit the time of the block, in which an upload arrives.

        Raises:
            SlowBodyError: the upload took over ``within_s`` seconds, or gave its place to another.

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
            if not timeout.expired():  # of another timeout, inside the block
                raise
            took_s = asyncio.get_running_loop().time() - started
            why = _cut_after(took_s) if upload.is_cut else _late_after(within_s)
            raise SlowBodyError(why) from error

    def cut_slowest(self) -> bool:
        """Cancel the slowest upload, if it is slow, to free its place.

        Otherwise idle connections could hold every place. Returns False if no upload is slow.
        """
        upload = self.slowest
        if upload is None or not upload.is_slow:
            return False
        del self.under_way[upload]
        if not upload.timeout.expired():  # otherwise it is ending already
            upload.is_cut = True
            upload.timeout.reschedule(asyncio.get_running_loop().time())
        return True


def _cut_after(seconds: float) -> str:
    return (
        f"the body had not arrived after {seconds:.1f} s, and other requests needed its place; "
        "try again, with fewer bytes or a faster connection"
    )


def _late_after(seconds: float) -> str:
    return (
        f"the body had not arrived after {seconds:g} s, the request's time limit; send fewer bytes "
        "at a time, or allow more time (request_timeout_s, x-request-timeout-seconds)"
    )
