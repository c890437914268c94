"""Repeats calls: on another replica after a failure, or as a hedge if an answer is late.

**Retries.** Classifying is idempotent. If a replica is gone before it has a call, Serve sends the
call to another. If the replica dies with the call, the caller gets an error, since Serve cannot
know whether repeating it does harm. Then this module repeats it.

**Hedges.** A replica that hangs, or whose node is unreachable, raises no error: its requests would
wait until their time is over. So a call without an answer after half of its time is made a second
time. By then the router knows which replicas are silent (:mod:`app.serve.locality_router`), and the
second call goes to another. (J. Dean and L. A. Barroso, The Tail at Scale, 2013; the budget follows
gRPC's retry throttling.)
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException

from app.errors import IN_A_SECOND, MORE_TIME, DeadlineError, NotReadyError, OverloadedError
from models.errors import TandemError

T = TypeVar("T")
CALL_ERRORS = (RayError, RayServeException)  # raised by calls through a handle
# A request that kills replicas must not go through all of them.
MAX_CALLS = 3
# In the shortest pause Serve's router marks the dead replica. A deadline ends a pause as it ends
# any wait. Pauses are random, so that a deadly request meets other requests each time.
PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.2
HEDGE_AFTER_SHARE = 0.5
# Images of second calls per image of first calls, in the long run: an overloaded stage must not get
# twice the work. And the number that may be saved up.
PER_IMAGE, MOST_SAVED = 0.1, 20.0


async def retry(
    call: Callable[[], Awaitable[T]],
    again: Callable[[], Awaitable[T]] | None = None,
    pause_s: Callable[[], float] = lambda: random.uniform(PAUSE_S, LONGEST_PAUSE_S),
) -> T:
    """Repeat a call while its replica dies, up to ``MAX_CALLS`` calls.

    ``again`` makes the repeated calls; None: ``call`` does. ``pause_s`` returns the time before
    each.

    Raises:
        RayActorError: the replica of the last call died as well.
    """
    for _ in range(MAX_CALLS - 1):
        try:
            return await call()
        except RayActorError:  # died or unreachable; a stage's own errors are of other classes
            await asyncio.sleep(pause_s())
            call = again or call
    return await call()


class HedgeBudget:
    """The number of images that second calls may still have."""

    def __init__(self) -> None:
        self._saved = MOST_SAVED

    def earn(self, num_images: int) -> None:
        self._saved = min(MOST_SAVED, self._saved + PER_IMAGE * num_images)

    def spend(self, num_images: int) -> bool:
        """Take ``num_images`` from the budget; return False if it is spent.

        A call with more images than are saved is allowed, since large forms would otherwise never
        be. Then the budget is negative until first calls have made up for it.
        """
        if self._saved < 1:
            return False
        self._saved -= num_images
        return True


async def hedged(
    call: Callable[[], Awaitable[T]],
    after_s: float,
    budget: HedgeBudget,
    num_images: int,
    again: Callable[[], Awaitable[T]] | None = None,
) -> T:
    """Return the answer of a call, or of a second call made ``after_s`` later.

    The slower of the two is cancelled. If both fail, the last error is raised. ``budget`` must have
    ``num_images`` for the second call, which ``again`` makes; None: ``call`` does. None is made if
    ``after_s`` is not positive.
    """
    budget.earn(num_images)
    calls = {asyncio.ensure_future(call())}
    try:
        done, _ = await asyncio.wait(calls, timeout=after_s)
        if not done and after_s > 0 and budget.spend(num_images):
            calls.add(asyncio.ensure_future((again or call)()))
        waiting = set(calls)
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if good := [each for each in done if not each.cancelled() and not each.exception()]:
                return good[0].result()
            if not waiting:
                return done.pop().result()
    finally:
        for each in calls:
            each.cancel()


def as_tandem(error: BaseException) -> TandemError:
    """Return a stage's own error; any other error becomes "the stage is unavailable"."""
    if isinstance(error, BackPressureError):
        return OverloadedError(f"every queue place is taken; {IN_A_SECOND}")
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, TandemError):
        return cause
    if isinstance(cause, TaskCancelledError):
        return DeadlineError(f"the request was cancelled on its way through the graph; {MORE_TIME}")
    return NotReadyError(f"a stage of the graph failed ({type(cause).__name__}); try again")
