"""Uploads under way: bounds their time, and cancels the slowest when its place is needed."""

import asyncio
import math
from types import TracebackType

from app.environment import MIB
from app.errors import SlowBodyError

# Nobody takes the place of an upload that has taken less, or less for each MiB that it announced.
SLOW_AFTER_S = 1.0
SLOW_S_PER_MIB = 0.25


class Uploads:
    """Knows them in the order of their arrival."""

    def __init__(self, slow_after_s: float | None = None) -> None:
        self.slow_after_s = SLOW_AFTER_S if slow_after_s is None else slow_after_s
        self.under_way: dict[Upload, None] = {}  # of which none was cut

    @property
    def num(self) -> int:
        """How many there are."""
        return len(self.under_way)

    @property
    def num_bytes(self) -> int:
        """How many bytes they announced together."""
        return sum(upload.num_bytes for upload in self.under_way)

    @property
    def slowest(self) -> "Upload | None":
        """The upload that is slow first, or has been for the longest time."""
        return min(self.under_way, key=lambda upload: upload.slow_from, default=None)

    def arriving(self, within_s: float = math.inf, num_bytes: int = 0) -> "Upload":
        """Bound the time that an upload takes to arrive in a block, be it a byte a second.

        ``num_bytes`` is the size it announced; 0 where nobody needs to know.

        Raises:
            SlowBodyError: it is not there after ``within_s`` seconds, or was cut for another.

        """
        return Upload(self, within_s, num_bytes)

    def cut_slowest(self) -> bool:
        """Cancel the slowest upload if it is slow, so that its place is free in a moment.

        Idle connections could otherwise hold every place. False if no upload is slow.
        """
        upload = self.slowest
        if upload is None or not upload.is_slow:
            return False
        del self.under_way[upload]
        upload.cut()
        return True


class Upload:
    """The block of :meth:`Uploads.arriving`."""

    __slots__ = (
        "_is_cut",
        "_started",
        "_timeout",
        "_uploads",
        "_within_s",
        "num_bytes",
        "slow_from",
    )

    def __init__(self, uploads: Uploads, within_s: float, num_bytes: int) -> None:
        self._uploads, self._within_s, self.num_bytes = uploads, within_s, num_bytes
        self._timeout = asyncio.timeout(within_s if math.isfinite(within_s) else None)
        self._started = 0.0  # by the loop's clock
        self.slow_from = math.inf  # by the loop's clock, from the block's beginning on
        self._is_cut = False  # for another, before its time

    @property
    def is_slow(self) -> bool:
        """Whether its place may be given away; so may one whose time is over."""
        now = asyncio.get_running_loop().time()
        return self._timeout.expired() or now >= self.slow_from

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._started = asyncio.get_running_loop().time()
        slow_after_s = max(self._uploads.slow_after_s, self.num_bytes / MIB * SLOW_S_PER_MIB)
        self.slow_from = self._started + slow_after_s
        self._uploads.under_way[self] = None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._uploads.under_way.pop(self, None)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            took_s = asyncio.get_running_loop().time() - self._started
            why = _cut_after(took_s) if self._is_cut else _late_after(self._within_s)
            raise SlowBodyError(why) from error

    def cut(self) -> None:
        """Cancel the upload, unless its time is over anyway: then it ends by itself."""
        if not self._timeout.expired():
            self._is_cut = True
            self._timeout.reschedule(asyncio.get_running_loop().time())


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
