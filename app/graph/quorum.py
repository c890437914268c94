"""How many members must answer, how long the others are waited for, and who is not asked.

With the policy ``all`` every member must answer. ``quorum`` takes more than half of them, ``any``
one: what is missing then is said in the answer, which is *degraded*.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from app.settings import AnswerPolicy

TRIAL_EVERY_S = 1.0
SHARE_OF_TIME = 0.9  # of what is left: the rest is for combining what came


def needed_of(policy: AnswerPolicy, num_members: int) -> int:
    """Return how many of the members must answer."""
    return {"all": num_members, "quorum": num_members // 2 + 1, "any": 1}[policy]


class Trust:
    """A member that failed or was late is left out, but for one trial a second.

    Otherwise every request would wait for a member that is down, and queue at it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_trial: dict[str, float] = {}  # of those that are not trusted

    def is_asked(self, name: str) -> bool:
        """Whether to ask a member now; asking one that is not trusted is its trial."""
        if name not in self._next_trial:
            return True
        now = self._clock()
        if now < self._next_trial[name]:
            return False
        self._next_trial[name] = now + TRIAL_EVERY_S
        return True

    def answered(self, name: str) -> None:
        """Trust a member from now on."""
        self._next_trial.pop(name, None)

    def failed(self, name: str) -> None:
        """Leave a member out from now on."""
        self._next_trial[name] = self._clock() + TRIAL_EVERY_S


async def enough_of(
    tasks: Mapping[str, asyncio.Task[Any]], needed: int, patience_s: float, left_s: float
) -> None:
    """Wait until every task is done, or no longer than is worth while.

    That is: until fewer than ``needed`` can still succeed; or, once as many have, ``patience_s``
    more; or until nearly all of ``left_s`` is over, unless all are needed (the request's own
    deadline ends that).
    """
    clock = asyncio.get_running_loop().time
    until = None if needed == len(tasks) else clock() + left_s * SHARE_OF_TIME
    pending = set(tasks.values())
    is_enough = False
    while pending:
        num_good = sum(has_succeeded(task) for task in tasks.values())
        if num_good + len(pending) < needed:
            return
        if until is not None and num_good >= needed and not is_enough:
            is_enough, until = True, min(until, clock() + patience_s)
        timeout = None if until is None else max(0.0, until - clock())
        done, pending = await asyncio.wait(
            pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            return


def has_succeeded(task: asyncio.Task[Any]) -> bool:
    """Whether a task ended with a result."""
    return task.done() and not task.cancelled() and task.exception() is None
