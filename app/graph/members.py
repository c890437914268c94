"""The members of the ensemble: asks them in parallel or by a fast plan, and collects their results.

The answer policy says how many must answer: every member (``all``), more than half of them
(``quorum``), or one (``any``). An answer that lacks members is *degraded*, and names them.

The protocols here are how the graph calls Decoder, members and Combiner. Objects in this process
(:mod:`app.stages`) implement them, and deployments behind a handle (:mod:`app.serve.set_stages`).
``left_s`` is the time that the request has left, in seconds. A call that would take longer raises
:class:`app.errors.DeadlineError`.

A fast plan (:mod:`models.ensemble`) asks the members in steps. An image goes on to the next step
only if the average of those before is not likely enough.
"""

import asyncio
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from app.answers import Combined, Decoded, MemberAnswer
from app.errors import (
    MORE_TIME,
    UPDATING,
    DeadlineError,
    NotOfferedError,
    OtherSetError,
    OverloadedError,
)
from app.graph.availability import CALL_ERRORS, as_tandem
from app.graph.request import ClassifyRequest, Regions
from app.queueing.overload import CircuitBreaker
from app.queueing.scheduler import SHADOW, Lane
from app.settings import AnswerPolicy
from app.telemetry.metrics import Interval, RequestObserver
from models.ensemble import Flags, PlanRecord, Probabilities, average
from models.errors import TandemError
from models.image import ImageInputs
from models.network import Pixels

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
    skipped: tuple[str, ...] = ()  # members that the fast plan did not ask
    missing: dict[str, str] = field(default_factory=dict)  # members without an answer, and why
    asked: tuple[str, ...] = ()  # of the fast plan, in its order; (): by the plan full
    step: int | None = None  # of the fast plan that answers; None: full, or members are missing


def needed_of(policy: AnswerPolicy, num_members: int) -> int:
    """Return how many of the members must answer under a policy."""
    return {"all": num_members, "quorum": num_members // 2 + 1, "any": 1}[policy]


async def enough_of(
    tasks: Mapping[str, asyncio.Future[Any]], needed: int, patience_s: float, left_s: float
) -> bool:
    """Wait until every call is done, or until waiting longer is not worth it.

    The wait ends early when fewer than ``needed`` calls can still succeed. It also ends
    ``patience_s`` after ``needed`` calls have succeeded, and when ``left_s`` has nearly passed.
    Returns whether unfinished calls had the whole of ``patience_s``: not if the request's own time
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
    """Whether members are missing because of this request: too little time, or too large."""
    return not {LATE, DeadlineError.code, OverloadedError.code}.isdisjoint(missing.values())


def has_succeeded(task: asyncio.Future[Any]) -> bool:
    """Whether a task ended with a result."""
    return task.done() and not task.cancelled() and task.exception() is None


class MemberStage(Protocol):
    """One network of the ensemble."""

    def classify(
        self, images: Pixels, left_s: float, lane: Lane, *, has_features: bool = False
    ) -> Awaitable[MemberAnswer]:
        """Return the probabilities of images, uint8 (K, H, W, 3) BGR, and their pooled features.

        ``has_features`` says whether these are asked for. Of a member in this process it is a
        future, which is cheaper than a task.
        """


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
            asks = {"has_features": True} if name == request.embedding else {}
            call = self._members[name].classify(part, left_s, request.lane, **asks)
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
            OtherSetError, NotOfferedError: a member serves another set, or has no features, which
                are no failures.
        """
        missing: dict[str, str] = {}
        refusals: list[OtherSetError | NotOfferedError] = []
        for name, task in tasks.items():  # each: asyncio logs an error that nobody retrieves
            if has_succeeded(task):
                if task.result().model_set_fingerprint != self._fingerprint:
                    refusals.append(OtherSetError(UPDATING))
                if self.breakers[name].is_open and not is_copy:
                    self.breakers[name].succeeded()
                continue
            error = _error_of(task)
            ours = None if error is None else as_tandem(error)
            if isinstance(ours, OtherSetError | NotOfferedError):
                refusals.append(ours)
                continue
            missing[name] = LATE if ours is None else ours.code
            is_its_fault = were_waited_for
            if ours is not None:
                is_its_fault = not isinstance(ours, (OverloadedError, DeadlineError))
            if is_its_fault and not is_copy:
                self.breakers[name].failed()
        if refusals:
            raise refusals[0]
        return missing


def _error_of(task: Answering) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _ended(interval: Interval, observer: RequestObserver, _: Answering) -> None:
    interval.end_ms = observer.elapsed_ms()


class DecoderStage(Protocol):
    """Decodes image files to pixels."""

    async def decode(
        self, files: list[bytes], left_s: float, lane: Lane, regions: Regions = ()
    ) -> Decoded:
        """Decode every file; a bad file becomes a fault in the answer.

        With ``regions`` the answer has an image or a fault for each of these, of the only file.
        """


class CombinerStage(Protocol):
    """Combines the members' probabilities into answers."""

    async def combine(
        self,
        members: Mapping[str, Probabilities],
        top_k: int,
        left_s: float,
        threshold: float | None,
        step: int | None = None,
        *,
        has_set: bool = False,
    ) -> list[Combined]:
        """Return an answer per image from float32 (K, C) of each member that answered.

        ``threshold`` is the request's, for a multi-label set; None: the set's own. ``step`` is that
        of the fast plan, from 0; None: by the plan full. ``has_set``: with answer sets.
        """


class ViewedMember:
    """A member that is asked about several views of each image, and answers their mean.

    The operator's ``preprocess`` makes the views, for example the image and its mirror image: the
    member is asked about the K * V images of uint8 (K, V, H, W, 3).
    """

    def __init__(self, member: MemberStage) -> None:
        self._member = member

    async def classify(
        self, images: Pixels, left_s: float, lane: Lane, **asks: bool
    ) -> MemberAnswer:
        """Return a row per image, the mean of its views' rows."""
        num_images, num_views = images.shape[:2]
        flat = images.reshape(num_images * num_views, *images.shape[2:])
        return folded(await self._member.classify(flat, left_s, lane, **asks), num_views)


def folded(answer: MemberAnswer, num_views: int) -> MemberAnswer:
    """Return the answer for K images from that for their K * V views, grouped by image.

    An image's times are those of its last view.
    """
    rows = answer.probabilities
    mean = rows.reshape(-1, num_views, rows.shape[1]).mean(axis=1, dtype=np.float32)  # (K, C)
    done_ms = np.add(answer.queue_ms, answer.infer_ms).reshape(-1, num_views)
    firsts = np.arange(len(done_ms)) * num_views
    last = (firsts + done_ms.argmax(axis=1)).tolist()
    features = answer.features
    if features is not None:
        features = features.reshape(-1, num_views, features.shape[1]).mean(axis=1, dtype=np.float32)
    return answer.rows(last)._replace(probabilities=mean, features=features)


class FastMembers:
    """Asks the members in the steps of a fast plan, each about the images that are left.

    ``weights`` are the manifest's. ``policy`` says how many of the plan's members must answer.
    """

    def __init__(
        self,
        plan: PlanRecord,
        members: Members,
        weights: Mapping[str, float],
        policy: AnswerPolicy = "all",
    ) -> None:
        self.plan, self._steps = plan, plan.steps
        self._members, self._weights = members, weights
        self._needed = needed_of(policy, len(plan.members))

    async def ask(self, images: Pixels, request: ClassifyRequest) -> list[MemberResults]:
        """Return the results of the images, grouped by the step that answers them.

        Each image is decided separately.
        """
        done: list[MemberResults] = []
        left: Sequence[int] = range(len(images))
        answers: dict[str, MemberAnswer] = {}
        times: dict[str, Interval] = {}
        missing: dict[str, str] = {}
        asked: tuple[str, ...] = ()
        for number, step in enumerate(self._steps):
            part = images if len(left) == len(images) else images[list(left)]
            needed = self._needed - len(answers)
            results = await self._ask_step(part, request, step.ask, number, needed)
            answers = answers | results.answers
            times = times | results.call_times
            missing |= results.missing
            asked += step.ask
            skipped = tuple(name for name in self._members.names if name not in asked)
            if step.stop_at is None:
                answering = None if missing else number
                done.append(
                    MemberResults(tuple(left), answers, times, skipped, missing, asked, answering)
                )
                break
            if missing:  # the probability of the others alone decides nothing
                continue
            stops = self._stops(answers, step.temperature, step.stop_at)
            if stops.all():
                done.append(MemberResults(tuple(left), answers, times, skipped, {}, asked, number))
                break
            if stops.any():
                ends = np.flatnonzero(stops).tolist()
                own = {name: answer.rows(ends) for name, answer in answers.items()}
                places = tuple(left[i] for i in ends)
                done.append(MemberResults(places, own, times, skipped, {}, asked, number))
                stay = np.flatnonzero(~stops).tolist()
                answers = {name: answer.rows(stay) for name, answer in answers.items()}
                left = [left[i] for i in stay]
        return done

    def _stops(
        self, answers: Mapping[str, MemberAnswer], temperature: float, stop_at: float
    ) -> Flags:
        """Return for each image whether the average is likely enough; False for NaN."""
        rows = {name: answer.probabilities for name, answer in answers.items()}
        likeliest = average(rows, self._weights, temperature).max(axis=1)
        stops: Flags = likeliest >= np.float32(stop_at)
        return stops

    async def _ask_step(
        self,
        images: Pixels,
        request: ClassifyRequest,
        names: tuple[str, ...],
        number: int,
        needed: int,
    ) -> MemberResults:
        """Ask the members of a step, of which some may fail if later ones can answer without them.

        Then they have half of the time that is left, and those that failed lately are not asked. A
        timeout counts as their failure only if that half is at least ``patience_s``.
        """
        later = sum(len(step.ask) for step in self._steps[number + 1 :])
        if not later or needed > later or request.lane == SHADOW:
            least = needed if not later else max(1, needed - later)
            (results,) = await self._members.ask(images, request, names, max(0, least))
            return results
        breakers = [self._members.breakers[name] for name in names]
        if not any([breaker.allows() for breaker in breakers]):
            return MemberResults((), {}, {}, missing=dict.fromkeys(names, NOT_ASKED))
        half_s = request.left_s / 2
        try:
            async with asyncio.timeout(half_s):
                (results,) = await self._members.ask(images, request, names, 1)
        except OtherSetError:
            raise
        except TimeoutError:
            if half_s >= self._members.patience_s:
                for breaker in breakers:
                    breaker.failed()
            return MemberResults((), {}, {}, missing=dict.fromkeys(names, DeadlineError.code))
        except (TandemError, *CALL_ERRORS) as error:
            code = as_tandem(error).code
            return MemberResults((), {}, {}, missing=dict.fromkeys(names, code))
        return results
