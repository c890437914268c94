"""Uploads under way: bounds their time, and cancels the slowest when its slot is needed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.errors import SlowBodyError

SLOW_AFTER_S = 1.0  # a body that has taken less is nobody's place to take


class Uploads:
    """Knows them in the order of their arrival."""

    def __init__(self) -> None:
        self._since: dict[asyncio.Timeout, float] = {}
        self._cut: set[asyncio.Timeout] = set()  # for others, before their time

    @property
    def num(self) -> int:
        """How many there are."""
        return len(self._since)

    @property
    def num_fresh(self) -> int:
        """How many have not taken long yet, as most never do."""
        if not self._since:
            return 0
        now = asyncio.get_running_loop().time()
        return sum(now - started < SLOW_AFTER_S for started in self._since.values())

    @asynccontextmanager
    async def arriving(self, within_s: float) -> AsyncIterator[None]:
        """Bound the time that a body takes to arrive, be it a byte a second.

        Raises:
            SlowBodyError: it is not there after ``within_s`` seconds, or was cut for another.

        """
        loop, timer = asyncio.get_running_loop(), asyncio.timeout(within_s)
        started = loop.time()
        try:
            async with timer:
                self._since[timer] = started
                try:
                    yield
                finally:
                    self._since.pop(timer, None)
        except TimeoutError as error:
            took_s = loop.time() - started if timer in self._cut else None
            raise SlowBodyError(_told(took_s, within_s)) from error
        finally:
            self._cut.discard(timer)

    def cut_slowest(self) -> bool:
        """Cancel the oldest upload if it is slow, so that its place is free in a moment.

        Idle connections could otherwise hold every place. False if no upload is slow.
        """
        if not self._since:
            return False
        loop, (timer, started) = asyncio.get_running_loop(), next(iter(self._since.items()))
        if not timer.expired() and loop.time() - started < SLOW_AFTER_S:
            return False
        del self._since[timer]
        if not timer.expired():  # it ends by itself, and a timer that has fired cannot be moved
            self._cut.add(timer)
            timer.reschedule(loop.time())
        return True


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
