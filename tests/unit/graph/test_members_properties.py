"""Whatever members do and whoever is trusted: requests end as soon as nothing more can come."""

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.errors import NotReadyError
from app.graph.members import Members, needed_of
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.messages import Fault, MemberAnswer
from app.queueing.circuit_breaker import CircuitBreaker
from app.responses import Classified
from app.settings import Settings
from app.settings.service import AnswerPolicy
from models.errors import TandemError
from tests.support.fakes import FakeCombiner, FakeDecoder, FakeMember, service_of
from tests.support.virtual_loop import run_virtually

NAMES = ("first", "second", "third")
SURE, UNSURE = b"good", b"good, but hard"  # pixels 4 and 15
TIMEOUT_S, PATIENCE_S = 16.0, 0.5
EARLY_S = 1e-6  # asyncio's timers fire up to the clock's resolution early or late


@dataclass(frozen=True)
class Plan:
    """What a member does when it is asked: after ``takes_s`` (inf: hangs) it answers or fails."""

    takes_s: float
    answers: bool
    circuit: str  # closed; open; trial: open, and it may be tried now


PLANS = st.builds(
    Plan,
    st.sampled_from([0.0, 0.25, 1.0, 2.0, math.inf]),
    st.booleans(),
    st.sampled_from(["closed", "open", "trial"]),
)
BOUNDED = settings(
    max_examples=400,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DOWN = Plan(0.0, False, "open")


class PlannedMember(FakeMember):
    """Notes when its one call began."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.began_s = plan, math.nan
        self.rows = {len(SURE): np.array((0.1, 0.8, 0.1), np.float32)}
        self.rows |= {len(UNSURE): np.array((0.45, 0.35, 0.2), np.float32)}

    async def classify(self, images, left_s, lane="interactive") -> MemberAnswer:
        self.began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(self.plan.takes_s if self.plan.takes_s < math.inf else 10 * TIMEOUT_S)
        if not self.plan.answers:
            raise NotReadyError("gone")
        return await super().classify(images, left_s, lane)


class Play:
    """One request for files to members with plans."""

    def __init__(
        self, tiny_set: Path, policy: AnswerPolicy, plans: list[Plan], files: list[bytes]
    ) -> None:
        self.members = {n: PlannedMember(p) for n, p in zip(NAMES, plans, strict=False)}
        self.files, self.needed = files, needed_of(policy, len(plans))
        self.settings = Settings(
            model_set=str(tiny_set), answer_policy=policy, member_patience_s=PATIENCE_S
        )
        self.answers: list[Classified | Fault] | None = None
        self.ended_s = math.nan

    def run(self, margin: float | None) -> None:
        self.settings = self.settings.model_copy(update={"cascade_margin": margin})
        run_virtually(self._run())

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        service = service_of(self.settings, FakeDecoder(), self.members, FakeCombiner())
        ensemble: Any = service._graph
        assert isinstance(ensemble.members, Members)
        for name, breaker in ensemble.members.breakers.items():
            trip(breaker, self.members[name].plan.circuit)
        request = ClassifyRequest(self.files, 3, TIMEOUT_S, "id", RequestObserver(clock))
        try:
            self.answers = await service.classify(request)
        except TandemError:
            self.answers = None
        self.ended_s = clock()

    @property
    def asked(self) -> list[PlannedMember]:
        return [member for member in self.members.values() if not math.isnan(member.began_s)]

    def last_event_s(self) -> float:
        """When the last call began, or ended that does."""
        ends = [m.began_s + m.plan.takes_s for m in self.asked if m.plan.takes_s < math.inf]
        return max([0.0, *ends, *(m.began_s for m in self.asked)])


def trip(breaker: CircuitBreaker, state: str) -> None:
    """Put a circuit into a state that lasts as long as a request."""
    now = [0.0]
    breaker._clock = lambda: now[0]
    if state != "closed":
        breaker.failed()
    if state == "trial":
        now[0] += 1000.0


def good(members: list[PlannedMember]) -> int:
    return sum(m.plan.answers and m.plan.takes_s < math.inf for m in members)


def hung(members: list[PlannedMember]) -> int:
    return sum(m.plan.takes_s == math.inf for m in members)


def settled_s(asked: list[PlannedMember], needed: int) -> float:
    """Return when so many have failed that ``needed`` cannot answer any more."""
    failed = sorted(m.began_s + m.plan.takes_s for m in asked if not m.plan.answers)
    most = max(0, len(asked) - needed)  # that may fail
    return failed[most] if most < len(failed) else TIMEOUT_S


@BOUNDED
@given(
    policy=st.sampled_from(["all", "quorum", "any"]),
    plans=st.lists(PLANS, min_size=2, max_size=3),
    margin=st.sampled_from([None, 0.5]),
    files=st.lists(st.sampled_from([SURE, UNSURE]), min_size=1, max_size=3),
)
@example("any", [Plan(0.0, True, "closed"), DOWN, DOWN], 0.5, [UNSURE])  # hung on e917524
@example("any", [Plan(0.0, True, "closed"), DOWN], 0.5, [SURE, UNSURE])
def test_a_request_ends_as_soon_as_nothing_more_can_come(tiny_set, policy, plans, margin, files):
    play = Play(tiny_set, policy, plans, files)
    play.run(margin)
    asked, needed = play.asked, play.needed
    first = play.members["first"]
    is_cascade = margin is not None
    can_do_without_first = needed < len(plans)
    if is_cascade and first in asked and hung([first]) and can_do_without_first:
        # It has half of the time, and then it is out.
        assert play.ended_s >= TIMEOUT_S / 2 - EARLY_S
        assert {m.began_s for m in asked if m is not first} == {TIMEOUT_S / 2}
        asked = [member for member in asked if member is not first]
    is_enough = good(asked) >= needed
    if is_cascade and good([first]) and first in asked and UNSURE not in files:
        is_enough, asked = True, [first]
        assert play.asked == [first]
    assert (play.answers is not None) == is_enough
    if is_enough:
        patience_s = PATIENCE_S if hung(asked) else 0.0
        assert play.ended_s <= play.last_event_s() + patience_s + EARLY_S
    elif is_cascade and first in asked and hung([first]):
        assert asked == [first]  # there is no answer without it
    else:
        rest = [m for m in asked if m is not first] if is_cascade else asked
        assert play.ended_s <= settled_s(rest or asked, needed - good(asked) + good(rest)) + EARLY_S
    assert play.ended_s <= TIMEOUT_S + EARLY_S
    check_answers(play, is_cascade)


def check_answers(play: Play, is_cascade: bool) -> None:
    if play.answers is None:
        return
    assert len(play.answers) == len(play.files)
    for file, answer in zip(play.files, play.answers, strict=True):
        missing, skipped = answer.missing_members or {}, answer.skipped_members or []
        assert {*answer.members, *missing, *skipped} == {*play.members}
        assert answer.degraded == bool(missing)
        assert bool(skipped) <= (is_cascade and file == SURE)
        assert len(answer.members) >= (1 if skipped else play.needed)
