"""Calls made again, on another replica or without an answer, and what their errors mean.

**Retries.** Classifying is idempotent. Serve sends a call again itself when the replica was gone
before it had the call; when it dies with the call, the caller is told, since Serve cannot know
whether a second time does harm.

**Hedges.** A replica that hangs, or whose node cannot be reached any more, raises nothing: every
request that is there when a link is cut would wait until its time is over. So a call without an
answer after half of its time is made a second time. By then the router knows who is silent
(:mod:`app.calls.locality_router`), and the second call goes to another replica. (J. Dean and L. A.
Barroso, The Tail at Scale, 2013; the budget is the idea of gRPC's retry throttling.)
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
OF_RAY = (RayError, RayServeException)  # what a call through a handle raises
# A request that kills whoever runs it must not go through all replicas: it gets two more.
MAX_CALLS = 3
# In the shortest pause Serve's router marks the replica; the deadline ends a pause as any other
# wait. Pauses differ by chance: what kills replicas meets the same others no second time.
PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.2
HEDGE_AFTER_SHARE = 0.5
# Second calls' images for each image of a first one, in the long run: a stage that is slow because
# it has too much to do must not get twice as much. And how many may have been saved up.
PER_IMAGE, MOST_SAVED = 0.1, 20.0


async def retry(
    call: Callable[[], Awaitable[T]],
    again: Callable[[], Awaitable[T]] | None = None,
    pause_s: Callable[[], float] = lambda: random.uniform(PAUSE_S, LONGEST_PAUSE_S),
) -> T:
    """Make a call until a replica lives through it, ``MAX_CALLS`` times at most.

    ``again`` makes the calls after the first one, if they are not made as that was.

    Raises:
        RayActorError: the last of them died as well.

    """
    for _ in range(MAX_CALLS - 1):
        try:
            return await call()
        except RayActorError:  # died, or out of reach; an error that the stage raised is another
            await asyncio.sleep(pause_s())
            call = again or call
    return await call()


class HedgeBudget:
    """How many images second calls may have."""

    def __init__(self) -> None:
        self._saved = MOST_SAVED

    def earn(self, num_images: int) -> None:
        self._saved = min(MOST_SAVED, self._saved + PER_IMAGE * num_images)

    def spend(self, num_images: int) -> bool:
        """Take a second call; return False if the budget is spent.

        One that has more images than are saved is made too, or no large form ever would be; there
        is no other until first calls have made up for it.
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
    """Return the answer of the first call, or of a second one that is made after ``after_s``.

    ``again`` makes the second one, if that is not made as the first was. There is none when no
    time is left (``after_s`` is not positive). Of two the other one is cancelled. If the calls
    fail, the error of the last one is raised.
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
    """Unwrap a stage's error; what is not ours means that the stage is not there."""
    if isinstance(error, BackPressureError):
        return OverloadedError(f"every queue place is taken; {IN_A_SECOND}")
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, TandemError):
        return cause
    if isinstance(cause, TaskCancelledError):
        return DeadlineError(f"the request was cancelled on its way through the graph; {MORE_TIME}")
    return NotReadyError(f"a stage of the graph failed ({type(cause).__name__}); try again")
