"""Answers without some member: who votes, who is waited for, and who is left out for a while."""

import asyncio
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from app.answers import Classified
from app.errors import DeadlineError, NotReadyError, OverloadedError, UnhealthyError
from app.graph.members import MEMBER_TRIAL_EVERY_S, enough_of, needed_of
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.queueing.scheduler import SHADOW, Lane
from app.settings import Settings
from tests.support.fakes import FakeCombiner, FakeDecoder, FakeMember, service_of
from tests.support.virtual_loop import run_virtually

SURE, UNSURE = (0.1, 0.8, 0.1), (0.45, 0.35, 0.2)


class Graph:
    """A gateway with three members."""

    def __init__(self, tiny_set, policy: str = "any", **settings: Any) -> None:
        self.members = {name: FakeMember() for name in ("first", "second", "third")}
        self.first, self.second, self.third = self.members.values()
        given = {"model_set": str(tiny_set), "member_patience_s": 0.0, "answer_policy": policy}
        self.service = service_of(
            Settings(**(given | settings)), FakeDecoder(), self.members, FakeCombiner()
        )
        self.clock = [0.0]
        self.ensemble: Any = self.service._graph
        for breaker in vars(self.ensemble)["members"].breakers.values():
            breaker._clock = lambda: self.clock[0]

    async def classify(self, timeout_s: float = 10.0, lane: Lane = "interactive") -> Classified:
        timeline = RequestObserver(asyncio.get_running_loop().time)  # which may be virtual
        request = ClassifyRequest([b"good"], 3, timeout_s, "id", timeline, lane=lane)
        (answer,) = await self.service.classify(request)
        assert isinstance(answer, Classified)
        return answer


@pytest.mark.parametrize(
    ("policy", "num_members", "needed"),
    [("all", 2, 2), ("quorum", 2, 2), ("quorum", 3, 2), ("quorum", 4, 3), ("any", 3, 1)],
)
def test_how_many_must_answer(policy, num_members, needed):
    assert needed_of(policy, num_members) == needed


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OverloadedError("no place"), "overloaded"),
        (DeploymentUnavailableError(DeploymentID("gone")), "not_ready"),
        (RuntimeError("no memory"), "not_ready"),
    ],
)
@pytest.mark.parametrize("policy", ["any", "quorum"])
async def test_a_member_that_fails_is_missing_and_named(tiny_set, policy, error, why):
    graph = Graph(tiny_set, policy)
    graph.second.raises = error
    answer = await graph.classify()
    assert answer.degraded
    assert list(answer.members) == ["first", "third"]
    assert answer.missing_members == {"second": why}
    assert sum(p.probability for p in answer.predictions) == pytest.approx(1.0)


async def test_whole_answers_name_nobody(tiny_set):
    answer = await Graph(tiny_set).classify()
    assert not answer.degraded
    assert answer.missing_members is None
    assert list(answer.members) == ["first", "second", "third"]


async def test_with_the_policy_all_none_may_be_missing(tiny_set):
    graph = Graph(tiny_set, "all")
    graph.second.raises = NotReadyError("gone")
    with pytest.raises(NotReadyError, match="gone"):
        await graph.classify()


async def test_too_few_is_an_error(tiny_set):
    graph = Graph(tiny_set, "quorum")
    graph.first.raises = graph.third.raises = NotReadyError("gone")
    with pytest.raises(NotReadyError, match="gone"):
        await graph.classify()


async def test_a_member_that_hangs_is_late(tiny_set):
    graph = Graph(tiny_set)
    graph.third.gate = asyncio.Event()
    answer = await graph.classify()
    assert answer.missing_members == {"third": "late"}
    await asyncio.sleep(0)
    assert graph.third.was_cancelled


def test_when_all_hang_the_deadline_says_so(tiny_set):
    graph = Graph(tiny_set)
    for member in graph.members.values():
        member.gate = asyncio.Event()
    with pytest.raises(DeadlineError, match="too few members answered in time"):
        run_virtually(graph.classify(timeout_s=0.05))


async def test_who_failed_is_left_out_but_for_a_trial_now_and_then(tiny_set):
    graph = Graph(tiny_set)
    graph.second.raises = NotReadyError("gone")
    await graph.classify()
    for _ in range(3):
        answer = await graph.classify()
        assert answer.missing_members == {"second": "not_asked"}
    assert len(graph.second.asked) == 1
    graph.clock[0] += MEMBER_TRIAL_EVERY_S
    assert (await graph.classify()).missing_members == {"second": "not_ready"}
    assert (await graph.classify()).missing_members == {"second": "not_asked"}
    graph.second.raises = None
    graph.clock[0] += MEMBER_TRIAL_EVERY_S
    assert not (await graph.classify()).degraded
    assert not (await graph.classify()).degraded


async def test_who_is_distrusted_is_asked_when_nobody_else_is_left(tiny_set):
    graph = Graph(tiny_set)
    graph.second.raises = NotReadyError("gone")
    await graph.classify()
    graph.second.raises = None
    graph.first.raises = graph.third.raises = NotReadyError("gone")
    with pytest.raises(NotReadyError):
        await graph.classify()
    assert list((await graph.classify()).members) == ["second"]


@pytest.mark.parametrize("error", [OverloadedError("form of 64"), DeadlineError("1 ms")])
async def test_what_a_client_asked_for_is_not_held_against_a_member(tiny_set, error):
    graph = Graph(tiny_set)
    graph.second.raises = error
    await graph.classify()
    graph.second.raises = None
    assert not (await graph.classify()).degraded


def test_nor_is_a_client_without_patience(tiny_set):
    graph = Graph(tiny_set, member_patience_s=5.0)
    graph.second.gate = asyncio.Event()
    assert (run_virtually(graph.classify(timeout_s=0.05))).missing_members == {"second": "late"}
    graph.second.gate = None
    assert not (run_virtually(graph.classify())).degraded


def test_nor_is_it_in_a_cascade(tiny_set):
    graph = Graph(tiny_set, cascade_margin=0.5, member_patience_s=5.0)
    graph.first.gate = asyncio.Event()
    assert (run_virtually(graph.classify(timeout_s=0.1))).missing_members == {"first": "deadline"}
    graph.first.gate = None
    assert (run_virtually(graph.classify())).missing_members is None


@pytest.mark.parametrize("settings", [{}, {"cascade_margin": 0.9}], ids=["together", "cascade"])
@pytest.mark.parametrize("name", ["first", "third"])
def test_a_copy_that_waits_for_a_turn_is_held_against_nobody(tiny_set, settings, name):
    """In the shadow lane it may wait longer than any patience; and it needs every member."""
    graph = Graph(tiny_set, **settings)
    graph.members[name].gate = asyncio.Event()
    with pytest.raises(DeadlineError):
        run_virtually(graph.classify(timeout_s=10.0, lane=SHADOW))
    graph.members[name].gate = None
    assert (run_virtually(graph.classify())).missing_members is None


def test_a_copy_that_a_slow_member_answers_does_not_make_clients_wait_for_it(tiny_set):
    graph = Graph(tiny_set, member_patience_s=0.05)
    graph.third.gate = asyncio.Event()
    assert (run_virtually(graph.classify())).missing_members == {"third": "late"}
    graph.third.gate = None
    assert (run_virtually(graph.classify(lane=SHADOW))).missing_members is None
    assert (run_virtually(graph.classify())).missing_members == {"third": "not_asked"}


@pytest.mark.parametrize("settings", [{}, {"cascade_margin": 0.9}], ids=["together", "cascade"])
async def test_a_copys_error_is_told_and_opens_no_circuit(tiny_set, settings):
    """So that the shadow lane learns that a version hangs, and clients miss no member."""
    graph = Graph(tiny_set, **settings)
    graph.first.raises = UnhealthyError("hangs")
    with pytest.raises(UnhealthyError, match="hangs"):
        await graph.classify(lane=SHADOW)
    graph.first.raises = None
    assert (await graph.classify()).missing_members is None


def test_a_first_of_a_cascade_that_had_its_time_is_left_out(tiny_set):
    graph = Graph(tiny_set, cascade_margin=0.5, member_patience_s=0.05)
    graph.first.gate = asyncio.Event()
    assert (run_virtually(graph.classify(timeout_s=0.2))).missing_members == {"first": "deadline"}
    assert (run_virtually(graph.classify())).missing_members == {"first": "not_asked"}


@pytest.mark.parametrize(("left_s", "had_their_time"), [(10.0, True), (1.3, False), (0.9, False)])
def test_patience_counts_from_when_enough_have_answered(left_s, had_their_time):
    """Enough after 1 s, patience 0.5 s: a request of 1.3 s gives the others less than that."""

    async def wait() -> bool:
        tasks = {
            "quick": asyncio.ensure_future(asyncio.sleep(1.0)),
            "late": asyncio.get_running_loop().create_future(),
        }
        try:
            return await enough_of(tasks, 1, 0.5, left_s)
        finally:
            for task in tasks.values():
                task.cancel()

    assert run_virtually(wait()) is had_their_time


async def test_a_cascade_goes_on_without_its_first(tiny_set):
    graph = Graph(tiny_set, cascade_margin=0.5)
    graph.first.raises = NotReadyError("gone")
    answer = await graph.classify()
    assert list(answer.members) == ["second", "third"]
    assert answer.missing_members == {"first": "not_ready"}
    assert (await graph.classify()).missing_members == {"first": "not_asked"}


def test_a_cascade_whose_first_hangs_asks_the_others_in_time(tiny_set):
    graph = Graph(tiny_set, cascade_margin=0.5)
    graph.first.gate = asyncio.Event()
    answer = run_virtually(graph.classify(timeout_s=0.2))
    assert list(answer.members) == ["second", "third"]
    assert answer.missing_members == {"first": "deadline"}


@pytest.mark.parametrize("policy", ["any", "quorum"])
async def test_a_cascade_that_is_not_sure_misses_a_later_one(tiny_set, policy):
    graph = Graph(tiny_set, policy, cascade_margin=0.5)
    graph.first.row = UNSURE
    graph.third.raises = NotReadyError("gone")
    answer = await graph.classify()
    assert list(answer.members) == ["first", "second"]
    assert answer.missing_members == {"third": "not_ready"}
    graph.first.row = SURE
    answer = await graph.classify()
    assert (answer.degraded, answer.skipped_members) == (False, ["second", "third"])
