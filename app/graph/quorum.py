"""The answer policy: how many members must answer, and how long the others are waited for.

With the policy ``all`` every member must answer. ``quorum`` takes more than half of them, ``any``
one: what is missing then is said in the answer, which is *degraded*.
"""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from app.settings import AnswerPolicy

WAIT_SHARE = 0.9  # of what is left: the rest is for combining what came


def needed_of(policy: AnswerPolicy, num_members: int) -> int:
    """Return how many of the members must answer."""
    return {"all": num_members, "quorum": num_members // 2 + 1, "any": 1}[policy]


async def enough_of(
    tasks: Mapping[str, asyncio.Future[Any]], needed: int, patience_s: float, left_s: float
) -> bool:
    """Wait until every call is done, or no longer than is worth while.

    That is: until fewer than ``needed`` can still succeed; or, once as many have, ``patience_s``
    more; or until nearly all of ``left_s`` is over. Where all are needed :class:`AllOrOneFailed`
    is enough: the request's own deadline ends that.

    Returns:
        Whether those that are not done had the whole of ``patience_s``; False if the request's own
        time ended the wait, which says nothing against them.

    """
    clock = asyncio.get_running_loop().time
    until = clock() + left_s * WAIT_SHARE
    patient_until = math.inf
    pending = set(tasks.values())
    while pending:
        num_good = sum(has_succeeded(task) for task in tasks.values())
        if num_good + len(pending) < needed:
            return False
        if num_good >= needed and patient_until == math.inf:
            patient_until = clock() + patience_s
            until = min(until, patient_until)
        done, pending = await asyncio.wait(
            pending, timeout=max(0.0, until - clock()), return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            return until == patient_until
    return False


class AllOrOneFailed:
    """Waits until ``num`` calls have all succeeded, or one has not, with less than asyncio.wait.

    ``over`` is the future to await; :meth:`ended` has to be told of every call.
    """

    __slots__ = ("_num_left", "over")

    def __init__(self, num: int) -> None:
        self._num_left = num
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(self, call: asyncio.Future[Any]) -> None:
        """Note that a call has ended."""
        self._num_left -= 1
        if not self.over.done() and (not self._num_left or not has_succeeded(call)):
            self.over.set_result(None)


def has_succeeded(task: asyncio.Future[Any]) -> bool:
    """Whether a task ended with a result."""
    return task.done() and not task.cancelled() and task.exception() is None
