"""Uploads under way: bounds their time, and cancels the slowest when its slot is needed."""

import asyncio
from types import TracebackType

from app.errors import SlowBodyError
from app.queueing.deadlines import Deadline, Deadlines

SLOW_AFTER_S = 1.0  # a body that has taken less is nobody's place to take


class Uploads:
    """Knows them in the order of their arrival."""

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        self._deadlines = deadlines or Deadlines()
        self.under_way: dict[Upload, float] = {}  # and when each began, by the loop's clock

    @property
    def num(self) -> int:
        """How many there are."""
        return len(self.under_way)

    @property
    def num_fresh(self) -> int:
        """How many have not taken long yet, as most never do."""
        if not self.under_way:
            return 0
        now = asyncio.get_running_loop().time()
        return sum(now - started < SLOW_AFTER_S for started in self.under_way.values())

    def arriving(self, within_s: float) -> "Upload":
        """Bound the time that a body takes to arrive in a block, be it a byte a second.

        Raises:
            SlowBodyError: it is not there after ``within_s`` seconds, or was cut for another.

        """
        return Upload(self, self._deadlines.within(within_s))

    def cut_slowest(self) -> bool:
        """Cancel the oldest upload if it is slow, so that its place is free in a moment.

        Idle connections could otherwise hold every place. False if no upload is slow.
        """
        if not self.under_way:
            return False
        now = asyncio.get_running_loop().time()
        upload, started = next(iter(self.under_way.items()))
        if not upload.deadline.has_expired and now - started < SLOW_AFTER_S:
            return False
        del self.under_way[upload]
        upload.cut()
        return True


class Upload:
    """The block of :meth:`Uploads.arriving`."""

    __slots__ = ("_is_cut", "_uploads", "deadline")

    def __init__(self, uploads: Uploads, deadline: Deadline) -> None:
        self._uploads, self.deadline = uploads, deadline
        self._is_cut = False  # for another, before its time

    def __enter__(self) -> None:
        self.deadline.__enter__()
        self._uploads.under_way[self] = self.deadline.started

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._uploads.under_way.pop(self, None)
        deadline = self.deadline
        try:
            deadline.__exit__(kind, error, trace)
        except TimeoutError:
            took_s = asyncio.get_running_loop().time() - deadline.started
            raise SlowBodyError(
                _told(took_s if self._is_cut else None, deadline.seconds)
            ) from error

    def cut(self) -> None:
        """Cancel the upload, unless its time is over anyway: then it ends by itself."""
        if not self.deadline.has_expired:
            self._is_cut = True
            self.deadline.expire_now()


def _told(cut_after_s: float | None, within_s: float) -> str:
    if cut_after_s is not None:
        return (
            f"the body was not there after {cut_after_s:.1f} s, and others waited for the place; "
            "try again, with fewer bytes or a faster connection"
        )
    return (
        f"the body was not there after {within_s:g} s, the request's time; send fewer bytes at a "
        "time, or allow more time (request_timeout_s, x-request-timeout-seconds)"
    )
