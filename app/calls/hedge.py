"""Hedged calls: a call without an answer after half of its time is made a second time.

A replica that hangs, or whose node cannot be reached any more, raises nothing: without this every
request that is there when a link is cut would wait until its time is over. By then the router knows
who is silent (:mod:`app.calls.locality_router`), so the second call goes to another replica.
(J. Dean and L. A. Barroso, The Tail at Scale, 2013; the budget is the idea of gRPC's retry
throttling.)
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
HEDGE_AFTER_SHARE = 0.5
# Second calls for each first one, in the long run: a stage that is slow because it has too much to
# do must not get twice as much. And how many may have been saved up.
PER_CALL, MOST_SAVED = 0.1, 20.0


class HedgeBudget:
    """How many second calls there may be."""

    def __init__(self) -> None:
        self._saved = MOST_SAVED

    def earn(self) -> None:
        """Note a first call."""
        self._saved = min(MOST_SAVED, self._saved + PER_CALL)

    def spend(self) -> bool:
        """Take a second call; return False if none is left."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True


async def hedged(
    call: Callable[[], Awaitable[T]],
    after_s: float,
    budget: HedgeBudget,
    again: Callable[[], Awaitable[T]] | None = None,
) -> T:
    """Return the answer of the first call, or of a second one that is made after ``after_s``.

    ``again`` makes the second one, if that is not made as the first was. There is none when no
    time is left (``after_s`` is not positive). Of two the other one is cancelled. If the calls
    fail, the error of the last one is raised.
    """
    budget.earn()
    calls = {asyncio.ensure_future(call())}
    try:
        done, _ = await asyncio.wait(calls, timeout=after_s)
        if not done and after_s > 0 and budget.spend():
            calls.add(asyncio.ensure_future((again or call)()))
        waiting = set(calls)
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if good := [one for one in done if not one.cancelled() and not one.exception()]:
                return good[0].result()
            if not waiting:
                return done.pop().result()
    finally:
        for one in calls:
            one.cancel()
