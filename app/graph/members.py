"""Asks the members of the ensemble in parallel and collects their results.

The answer policy says how many must answer: every member (``all``), more than half of them
(``quorum``), or one (``any``). An answer that lacks members is *degraded*, and names them.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from app.calls.attempts import as_tandem
from app.errors import MORE_TIME, UPDATING, DeadlineError, OtherSetError, OverloadedError
from app.graph.observer import Interval, RequestObserver
from app.graph.request import ClassifyRequest
from app.graph.stages import MemberStage
from app.messages import MemberAnswer
from app.queueing.circuit_breaker import CircuitBreaker
from app.queueing.priority import SHADOW
from app.settings import AnswerPolicy
from models.image_inputs import ImageInputs
from models.runtime import Pixels

Answering = asyncio.Future[MemberAnswer]
LATE = "late"
NOT_ASKED = "not_asked"  # the member failed lately
# A member that failed or was late is skipped, except for trials: requests would wait for it.
MEMBER_TRIAL_EVERY_S = 1.0
WAIT_SHARE = 0.9  # of the time left; the rest is for combining the answers


@dataclass(frozen=True, slots=True)
class MemberResults:
    """The results of a request's images that were answered by the same members."""

    images: tuple[int, ...]  # their places among the request's good images
    answers: dict[str, MemberAnswer]  # by member, with a row for each of ``images``
    call_times: dict[str, Interval]
    skipped: tuple[str, ...] = ()  # members that the cascade did not ask
    missing: dict[str, str] = field(default_factory=dict)  # members without an answer, and why


def needed_of(policy: AnswerPolicy, num_members: int) -> int:
    """Return how many of the members must answer under a policy."""
    return {"all": num_members, "quorum": num_members // 2 + 1, "any": 1}[policy]


async def enough_of(
    tasks: Mapping[str, asyncio.Future[Any]], needed: int, patience_s: float, left_s: float
) -> bool:
    """Wait until every call is done, or until waiting longer is not worth it.

    The wait ends early when fewer than ``needed`` calls can still succeed, ``patience_s`` after
    ``needed`` calls have succeeded, or when nearly all of ``left_s`` has passed.

    Returns:
        Whether unfinished calls had the whole of ``patience_s``. False if the request's own time
        limit ended the wait, which is not their fault.

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


def says_nothing_of_others(missing: Mapping[str, str]) -> bool:
    """Whether members are missing because of their request: it left no time, or is too large."""
    return not {LATE, DeadlineError.code, OverloadedError.code}.isdisjoint(missing.values())


def has_succeeded(task: asyncio.Future[Any]) -> bool:
    """Whether a task ended with a result."""
    return task.done() and not task.cancelled() and task.exception() is None


class Members:
    """Asks the members, which are handles or objects in this process, by name.

    ``inputs`` describes the input of each member. ``policy`` says how many must answer, and
    ``patience_s`` how long to wait for the others then. ``fingerprint`` is that of the model set
    that they must serve.
    """

    def __init__(
        self,
        members: Mapping[str, MemberStage],
        inputs: ImageInputs,
        fingerprint: str,
        policy: AnswerPolicy = "all",
        patience_s: float = 1.0,
    ) -> None:
        self._members, self._inputs, self._fingerprint = members, inputs, fingerprint
        self.names = tuple(members)
        self.needed = needed_of(policy, len(members))
        self.patience_s = patience_s
        self.breakers = {
            name: CircuitBreaker(MEMBER_TRIAL_EVERY_S, MEMBER_TRIAL_EVERY_S) for name in members
        }

    async def ask(
        self,
        images: Pixels,
        request: ClassifyRequest,
        names: Sequence[str] | None = None,
        needed: int | None = None,
    ) -> list[MemberResults]:
        """Send the images to all members at once, or to those in ``names``; return their results.

        ``needed`` of them must answer, by default as many as the policy says. A copy in the shadow
        lane needs all of them, since whole answers are compared.
        """
        names = self.names if names is None else names
        is_copy = request.lane == SHADOW
        if is_copy:
            needed = len(names)
        elif needed is None:
            needed = self.needed
        chosen = self._chosen(names, needed)
        times: dict[str, Interval] = {}
        sent_ms, left_s = request.observer.elapsed_ms(), request.left_s
        asked: dict[str, Answering] = {}
        for name in chosen:
            times[name] = interval = Interval(sent_ms)
            part = self._inputs.of(name, images)
            call = self._members[name].classify(part, left_s, request.lane)
            # A call in this process is a future already, and its interval has no end: there is no
            # transport whose time could be subtracted.
            if not isinstance(call, asyncio.Future):
                call = asyncio.ensure_future(call)
                call.add_done_callback(partial(_ended, interval, request.observer))
            asked[name] = call
        were_waited_for = False
        try:
            if asked and needed >= len(asked):  # the first failure or the deadline ends the wait
                await asyncio.wait(asked.values(), return_when=asyncio.FIRST_EXCEPTION)
            else:
                were_waited_for = await enough_of(asked, needed, self.patience_s, left_s)
        finally:  # the remaining calls are not needed any more
            for call in asked.values():
                if not call.done():
                    call.add_done_callback(_error_of)  # retrieved, or asyncio would log it
                    call.cancel()
        if not is_copy and self._all_answered(asked) and len(asked) == len(names):
            answers = {name: call.result() for name, call in asked.items()}
            return [MemberResults(tuple(range(len(images))), answers, times)]
        missing = self._judge(asked, were_waited_for, is_copy=is_copy)
        if len(asked) - len(missing) < needed:
            late = DeadlineError(f"too few members answered in time; {MORE_TIME}")
            raise next(filter(None, map(_error_of, asked.values())), late)
        missing |= dict.fromkeys((name for name in names if name not in asked), NOT_ASKED)
        answers = {name: call.result() for name, call in asked.items() if name not in missing}
        return [MemberResults(tuple(range(len(images))), answers, times, missing=missing)]

    def _chosen(self, names: Sequence[str], needed: int) -> Sequence[str]:
        """Return the members to ask: all, or without those that failed lately if others suffice."""
        if needed == len(names):
            return names
        chosen = [name for name in names if self.breakers[name].allows()]
        return chosen if len(chosen) >= needed else names

    def _all_answered(self, asked: Mapping[str, Answering]) -> bool:
        """Whether every call has an answer of this model set, and no circuit is open."""
        for name, call in asked.items():
            if not call.done() or call.cancelled() or call.exception() is not None:
                return False
            if call.result().model_set_fingerprint != self._fingerprint:
                return False
            if self.breakers[name].is_open:
                return False
        return True

    def _judge(
        self, tasks: Mapping[str, Answering], were_waited_for: bool, *, is_copy: bool
    ) -> dict[str, str]:
        """Return the members that did not answer, and why; open the circuit of those at fault.

        A full queue or a client's short deadline is not a member's fault. A late answer is, if the
        member had ``patience_s`` after enough others had answered. A copy opens and closes no
        circuit, since it may wait longer than a client would.

        Raises:
            OtherSetError: a member serves another set, which is not a failure.

        """
        missing: dict[str, str] = {}
        of_other_sets: list[OtherSetError] = []
        for name, task in tasks.items():  # each: asyncio logs an error that nobody retrieves
            if has_succeeded(task):
                if task.result().model_set_fingerprint != self._fingerprint:
                    of_other_sets.append(OtherSetError(UPDATING))
                if self.breakers[name].is_open and not is_copy:
                    self.breakers[name].succeeded()
                continue
            error = _error_of(task)
            ours = None if error is None else as_tandem(error)
            if isinstance(ours, OtherSetError):
                of_other_sets.append(ours)
                continue
            missing[name] = LATE if ours is None else ours.code
            is_its_fault = were_waited_for
            if ours is not None:
                is_its_fault = not isinstance(ours, (OverloadedError, DeadlineError))
            if is_its_fault and not is_copy:
                self.breakers[name].failed()
        if of_other_sets:
            raise of_other_sets[0]
        return missing


def _error_of(task: Answering) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _ended(interval: Interval, observer: RequestObserver, _: Answering) -> None:
    interval.end_ms = observer.elapsed_ms()
