"""Limits the time of uploads, and cancels the slowest upload when its place is needed."""

import asyncio
import math
from types import TracebackType
from typing import Self

from app.environment import MIB
from app.errors import SlowBodyError

# An upload keeps its place for this time, or for this time per MiB that it announced.
SLOW_AFTER_S = 1.0
SLOW_S_PER_MIB = 0.25


class Upload:
    """An upload under way: an asynchronous context manager of the block in which it arrives.

    Times are by the loop's clock. ``num_bytes`` is its announced length; 0 if only the number of
    uploads matters.

    Raises:
        SlowBodyError: the upload took over ``within_s`` seconds, or gave its place to another.

    """

    __slots__ = ("_started", "_uploads", "_within_s", "is_cut", "num_bytes", "slow_from", "timeout")

    def __init__(self, uploads: "Uploads", within_s: float, num_bytes: int) -> None:
        self._uploads, self._within_s, self.num_bytes = uploads, within_s, num_bytes
        self.timeout = asyncio.timeout(within_s if math.isfinite(within_s) else None)
        self._started = asyncio.get_running_loop().time()
        slow_after_s = max(uploads.slow_after_s, num_bytes / MIB * SLOW_S_PER_MIB)
        self.slow_from = self._started + slow_after_s
        self.is_cut = False  # cancelled to make room for another

    @property
    def is_slow(self) -> bool:
        """Whether its place may go to another: it is slow, or its time is over."""
        now = asyncio.get_running_loop().time()
        return self.timeout.expired() or now >= self.slow_from

    async def __aenter__(self) -> Self:
        await self.timeout.__aenter__()
        self._uploads.under_way[self] = None
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._uploads.under_way.pop(self, None)
        try:
            await self.timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            took_s = asyncio.get_running_loop().time() - self._started
            why = _cut_after(took_s) if self.is_cut else _late_after(self._within_s)
            raise SlowBodyError(why) from late


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

    def arriving(self, within_s: float = math.inf, num_bytes: int = 0) -> Upload:
        """Return an upload, which limits the time of the block in which it arrives."""
        return Upload(self, within_s, num_bytes)

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
