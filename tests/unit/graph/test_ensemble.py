"""The way through the stages: whole answers, and answers without a member."""

import asyncio
import time
from importlib.metadata import version
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from app.access import Caller
from app.answers import Classified, cpu_ms
from app.errors import DeadlineError, NotReadyError, OverloadedError, UnhealthyError
from app.graph.members import MEMBER_TRIAL_EVERY_S, enough_of, needed_of
from app.graph.request import ClassifyRequest
from app.queueing.scheduler import SHADOW, Lane
from app.settings import Settings
from app.telemetry.metrics import RequestObserver
from models.errors import ModelSetError
from tests.support import fakes
from tests.support.cases import cases
from tests.support.hand_clock import HandClock
from tests.support.plans import planned
from tests.support.tiny_networks import LABELS, write_tiny_set
from tests.support.virtual_loop import run_virtually

LATE_S = 0.05
SURE, UNSURE = (0.1, 0.8, 0.1), (0.45, 0.35, 0.2)


class Graph:
    """The service with its fake stages within reach."""

    def __init__(self, tiny_set, *, as_handles: bool = False) -> None:
        self.decoder, self.combiner = fakes.FakeDecoder(), fakes.FakeCombiner()
        self.members = {
            "sure": fakes.FakeMember((0.1, 0.8, 0.1)),
            "unsure": fakes.FakeMember((0.2, 0.5, 0.3)),
        }
        settings = Settings(model_set=str(tiny_set))
        stages = (self.decoder, self.members, self.combiner)
        self.service = fakes.service_of(settings, *stages, as_handles=as_handles)

    async def classify(self, *files: bytes, top_k: int = 2, timeout_s: float = 10.0):
        return await self.service.classify(
            ClassifyRequest(list(files), top_k, timeout_s, "id", fakes.arrived())
        )


@pytest.fixture
def graph(tiny_set) -> Graph:
    return Graph(tiny_set)


async def test_a_key_is_told_its_images_and_their_cpu_time(graph):
    """A bad image counts for nobody; what is done once for both images is counted once."""
    caller, files = Caller("bob", has_key=True), [b"good", b"bad", b"good"]
    request = ClassifyRequest(files, 2, 10.0, "id", fakes.arrived())
    await graph.service.classify(request)  # whose caller has no key
    answers = await graph.service.classify(request._replace(caller=caller))
    first, second = (answer for answer in answers if isinstance(answer, Classified))
    (combine,) = {s.duration_ms for s in first.timings_ms.stages if s.stage == "combine"}
    expected = cpu_ms(first, 1) + cpu_ms(second, 1) - combine
    (figures,) = graph.service.keys.figures.values()
    assert (figures.images, figures.cpu_ms) == (2, pytest.approx(expected))
    assert figures.cpu_ms > 0


@pytest.mark.parametrize("as_handles", [False, True], ids=["local objects", "handles"])
async def test_one_image_through_the_graph(tiny_set, as_handles):
    (answer,) = await Graph(tiny_set, as_handles=as_handles).classify(b"good")
    assert isinstance(answer, Classified)
    assert answer.model_set == "tiny"
    assert [p.label for p in answer.predictions] == [LABELS[1], LABELS[2]]
    assert answer.predictions[0].probability == pytest.approx(0.65)
    assert set(answer.members) == {"sure", "unsure"}
    assert answer.members["unsure"].probability == pytest.approx(0.5)
    assert answer.agreement
    assert not answer.degraded
    stages = [(s.stage, s.member) for s in answer.timings_ms.stages]
    of_members = [(stage, name) for name in ("sure", "unsure") for stage in ("queue", "infer")]
    assert stages == [("read", None), ("decode", None), *of_members, ("combine", None)]


async def test_members_that_disagree(graph):
    graph.members["sure"].row = (0.9, 0.1, 0.0)
    (answer,) = await graph.classify(b"good")
    assert not answer.agreement
    assert answer.members["sure"].label == LABELS[0]
    assert answer.members["unsure"].label == LABELS[1]


async def test_when_all_are_bad_no_member_is_asked(graph):
    assert await graph.classify(b"bad", b"worse") == [fakes.NOT_AN_IMAGE, fakes.NOT_AN_IMAGE]
    assert graph.members["sure"].asked == []


async def test_members_are_asked_at_the_same_time(graph):
    gates = {name: asyncio.Event() for name in graph.members}
    for name, member in graph.members.items():
        member.gate = gates[name]
    request = asyncio.ensure_future(graph.classify(b"good"))
    while not all(member.asked for member in graph.members.values()):
        await asyncio.sleep(0)
        assert not request.done()
    for gate in gates.values():
        gate.set()
    await request


async def test_when_a_member_fails_the_other_is_let_go(graph):
    graph.members["sure"].raises = OverloadedError("no place")
    graph.members["unsure"].gate = asyncio.Event()
    with pytest.raises(OverloadedError, match="no place"):
        await graph.classify(b"good")
    await asyncio.sleep(0)
    assert graph.members["unsure"].was_cancelled


async def test_a_caller_that_leaves_lets_the_members_go(graph):
    for member in graph.members.values():
        member.gate = asyncio.Event()
    request = asyncio.ensure_future(graph.classify(b"good"))
    while not graph.members["unsure"].asked:
        await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await asyncio.sleep(0)
    assert all(member.was_cancelled for member in graph.members.values())


async def test_a_member_that_hangs_ends_with_the_deadline(graph):
    graph.members["sure"].gate = asyncio.Event()
    with pytest.raises(DeadlineError, match=r"no answer within 0\.01 s.*x-request-timeout-seconds"):
        await graph.classify(b"good", timeout_s=0.01)
    await asyncio.sleep(0)
    assert graph.members["sure"].was_cancelled


async def test_the_time_of_reading_the_body_counts(graph):
    clock = HandClock()
    timeline = RequestObserver(clock.monotonic)
    clock.now += 60  # the body took a minute
    with pytest.raises(DeadlineError):
        await graph.service.classify(ClassifyRequest([b"good"], 1, 10.0, "id", timeline))


def remote(error: Exception) -> RayTaskError:
    """Return what Ray raises at the caller when ``error`` was raised in another process."""
    return RayTaskError("classify", "traceback", error).as_instanceof_cause()


@cases(
    "raised, expected, says",
    (BackPressureError(10, 10), OverloadedError, "try again in a second"),
    (remote(OverloadedError("512 queued")), OverloadedError, "512 queued"),
    (remote(DeadlineError("too late")), DeadlineError, "too late"),
    (remote(ModelSetError("a file is missing")), ModelSetError, "a file is missing"),
    (remote(RuntimeError("secret")), NotReadyError, r"\(RuntimeError\); try again"),
    (TaskCancelledError(), DeadlineError, "cancelled"),
    (ActorDiedError(), NotReadyError, "ActorDiedError"),
    (DeploymentUnavailableError(DeploymentID("a")), NotReadyError, "DeploymentUnavailableErr"),
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_errors_of_the_graph_become_ours(graph, raised, expected, says):
    graph.members["sure"].raises = raised
    with pytest.raises(expected, match=says) as caught:
        await graph.classify(b"good")
    assert type(caught.value) is expected
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("stage", ["decoder", "combiner"])
async def test_the_other_stages_errors_too(graph, stage, monkeypatch):
    async def fail(*_: object) -> None:
        raise remote(OSError("gone"))

    method = {"decoder": "decode", "combiner": "combine"}[stage]
    monkeypatch.setattr(getattr(graph, stage), method, fail)
    with pytest.raises(NotReadyError, match="OSError"):
        await graph.classify(b"good")


def test_what_is_served(graph):
    served = graph.service.served_models()
    assert (served.model_set, served.input_size, served.labels) == ("tiny", 16, list(LABELS))
    assert [(m.name, m.precision) for m in served.members] == [("sure", "INT8"), ("unsure", "INT8")]
    assert {(m.runtime.name, m.runtime.version) for m in served.members} == {
        ("openvino", version("openvino"))
    }
    assert graph.service.num_classes == 3


class LateMember(fakes.FakeMember):
    """A member of this process, of whose answer a busy loop hears late."""

    def classify(self, images, left_s, lane="interactive", *, has_features=False) -> Any:
        answering = super().classify(images, left_s, lane)

        async def late():
            answer = await answering
            time.sleep(LATE_S)  # the loop does something else
            return answer

        return asyncio.ensure_future(late())


async def test_a_local_members_bars_begin_with_its_call(tiny_set):
    graph = Graph(tiny_set)
    graph.members |= {"sure": LateMember((0.1, 0.8, 0.1))}
    stages = graph.decoder, graph.members, graph.combiner
    graph.service = fakes.service_of(Settings(model_set=str(tiny_set)), *stages)
    (answer,) = await graph.classify(b"good")
    (queued,) = [s for s in answer.timings_ms.stages if (s.stage, s.member) == ("queue", "sure")]
    assert queued.start_ms <= answer.timings_ms.total - LATE_S * 1e3


# Answers without some member: who votes, who is waited for, and who is left out for a while.


class DegradedGraph:
    """A gateway with three members."""

    def __init__(self, tiny_set, policy: str = "any", **settings: Any) -> None:
        self.members = {name: fakes.FakeMember() for name in ("first", "second", "third")}
        self.first, self.second, self.third = self.members.values()
        given = {"model_set": str(tiny_set), "member_patience_s": 0.0, "answer_policy": policy}
        self.service = fakes.service_of(
            Settings(**(given | settings)), fakes.FakeDecoder(), self.members, fakes.FakeCombiner()
        )
        self.clock = [0.0]
        self.ensemble: Any = self.service._graph
        for breaker in vars(self.ensemble)["members"].breakers.values():
            breaker._clock = lambda: self.clock[0]

    async def classify(self, timeout_s: float = 10.0, lane: Lane = "interactive") -> Classified:
        timeline = RequestObserver(asyncio.get_running_loop().time)  # which may be virtual
        plan = self.service.settings.plan
        request = ClassifyRequest([b"good"], 3, timeout_s, "id", timeline, lane=lane, plan=plan)
        (answer,) = await self.service.classify(request)
        assert isinstance(answer, Classified)
        return answer


def with_plan(folder, stop_at):
    """Write a set of three members, with the plan to ask the first, and then the others."""
    write_tiny_set(folder, gains={"first": 8.0, "second": -4.0, "third": 2.0})
    return planned(folder, (("first",), stop_at), (("second", "third"), None))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return with_plan(tmp_path_factory.mktemp("sets") / "tiny", 0.7)


@pytest.fixture(scope="module")
def unsure(tmp_path_factory):  # the first is never likely enough
    return with_plan(tmp_path_factory.mktemp("sets") / "tiny", 0.9)


@pytest.mark.parametrize(
    ("policy", "num_members", "needed"),
    [("all", 2, 2), ("quorum", 2, 2), ("quorum", 3, 2), ("quorum", 4, 3), ("any", 3, 1)],
)
def test_how_many_must_answer(policy, num_members, needed):
    assert needed_of(policy, num_members) == needed


@cases(
    "error, why",
    (OverloadedError("no place"), "overloaded"),
    (DeploymentUnavailableError(DeploymentID("gone")), "not_ready"),
    (RuntimeError("no memory"), "not_ready"),
)
@pytest.mark.parametrize("policy", ["any", "quorum"])
async def test_a_member_that_fails_is_missing_and_named(three, policy, error, why):
    graph = DegradedGraph(three, policy)
    graph.second.raises = error
    answer = await graph.classify()
    assert answer.degraded
    assert list(answer.members) == ["first", "third"]
    assert answer.missing_members == {"second": why}
    assert sum(p.probability for p in answer.predictions) == pytest.approx(1.0)


async def test_whole_answers_name_nobody(three):
    answer = await DegradedGraph(three).classify()
    assert not answer.degraded
    assert answer.missing_members is None
    assert list(answer.members) == ["first", "second", "third"]


@pytest.mark.parametrize(("policy", "gone"), [("all", ("second",)), ("quorum", ("first", "third"))])
async def test_too_few_is_an_error(three, policy, gone):
    graph = DegradedGraph(three, policy)
    for name in gone:
        graph.members[name].raises = NotReadyError("gone")
    with pytest.raises(NotReadyError, match="gone"):
        await graph.classify()


async def test_a_member_that_hangs_is_late(three):
    graph = DegradedGraph(three)
    graph.third.gate = asyncio.Event()
    assert (await graph.classify()).missing_members == {"third": "late"}
    await asyncio.sleep(0)
    assert graph.third.was_cancelled


def test_when_all_hang_the_deadline_says_so(three):
    graph = DegradedGraph(three)
    for member in graph.members.values():
        member.gate = asyncio.Event()
    with pytest.raises(DeadlineError, match="too few members answered in time"):
        run_virtually(graph.classify(timeout_s=0.05))


async def test_who_failed_is_left_out_but_for_a_trial_now_and_then(three):
    graph = DegradedGraph(three)
    graph.second.raises = NotReadyError("gone")
    await graph.classify()
    for _ in range(3):
        assert (await graph.classify()).missing_members == {"second": "not_asked"}
    assert len(graph.second.asked) == 1
    graph.clock[0] += MEMBER_TRIAL_EVERY_S
    assert (await graph.classify()).missing_members == {"second": "not_ready"}
    assert (await graph.classify()).missing_members == {"second": "not_asked"}
    graph.second.raises = None
    graph.clock[0] += MEMBER_TRIAL_EVERY_S
    assert not (await graph.classify()).degraded
    assert not (await graph.classify()).degraded


async def test_who_is_distrusted_is_asked_when_nobody_else_is_left(three):
    graph = DegradedGraph(three)
    graph.second.raises = NotReadyError("gone")
    await graph.classify()
    graph.second.raises = None
    graph.first.raises = graph.third.raises = NotReadyError("gone")
    with pytest.raises(NotReadyError):
        await graph.classify()
    assert list((await graph.classify()).members) == ["second"]


@pytest.mark.parametrize("error", [OverloadedError("form of 64"), DeadlineError("1 ms")])
async def test_what_a_client_asked_for_is_not_held_against_a_member(three, error):
    graph = DegradedGraph(three)
    graph.second.raises = error
    await graph.classify()
    graph.second.raises = None
    assert not (await graph.classify()).degraded


def test_nor_is_a_client_without_patience(three):
    graph = DegradedGraph(three, member_patience_s=5.0)
    graph.second.gate = asyncio.Event()
    assert (run_virtually(graph.classify(timeout_s=0.05))).missing_members == {"second": "late"}
    graph.second.gate = None
    assert not (run_virtually(graph.classify())).degraded


def test_nor_is_it_by_a_fast_plan(three):
    graph = DegradedGraph(three, plan="fast", member_patience_s=5.0)
    graph.first.gate = asyncio.Event()
    assert (run_virtually(graph.classify(timeout_s=0.1))).missing_members == {"first": "deadline"}
    graph.first.gate = None
    assert (run_virtually(graph.classify())).missing_members is None


@pytest.mark.parametrize("settings", [{}, {"plan": "fast"}], ids=["full", "fast"])
@pytest.mark.parametrize("name", ["first", "third"])
def test_a_copy_that_waits_for_a_turn_is_held_against_nobody(unsure, settings, name):
    """In the shadow lane it may wait longer than any patience; and it needs every member."""
    graph = DegradedGraph(unsure, **settings)
    graph.members[name].gate = asyncio.Event()
    with pytest.raises(DeadlineError):
        run_virtually(graph.classify(timeout_s=10.0, lane=SHADOW))
    graph.members[name].gate = None
    assert (run_virtually(graph.classify())).missing_members is None


def test_a_copy_that_a_slow_member_answers_does_not_make_clients_wait_for_it(three):
    graph = DegradedGraph(three, member_patience_s=0.05)
    graph.third.gate = asyncio.Event()
    assert (run_virtually(graph.classify())).missing_members == {"third": "late"}
    graph.third.gate = None
    assert (run_virtually(graph.classify(lane=SHADOW))).missing_members is None
    assert (run_virtually(graph.classify())).missing_members == {"third": "not_asked"}


@pytest.mark.parametrize("settings", [{}, {"plan": "fast"}], ids=["full", "fast"])
async def test_a_copys_error_is_told_and_opens_no_circuit(three, settings):
    """So that the shadow lane learns that a version hangs, and clients miss no member."""
    graph = DegradedGraph(three, **settings)
    graph.first.raises = UnhealthyError("hangs")
    with pytest.raises(UnhealthyError, match="hangs"):
        await graph.classify(lane=SHADOW)
    graph.first.raises = None
    assert (await graph.classify()).missing_members is None


def test_a_first_step_that_had_its_time_is_left_out(three):
    graph = DegradedGraph(three, plan="fast", member_patience_s=0.05)
    graph.first.gate = asyncio.Event()
    answer = run_virtually(graph.classify(timeout_s=0.2))
    assert list(answer.members) == ["second", "third"]
    assert answer.missing_members == {"first": "deadline"}
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


async def test_a_plan_goes_on_without_its_first(three):
    graph = DegradedGraph(three, plan="fast")
    graph.first.raises = NotReadyError("gone")
    answer = await graph.classify()
    assert list(answer.members) == ["second", "third"]
    assert answer.missing_members == {"first": "not_ready"}
    assert (await graph.classify()).missing_members == {"first": "not_asked"}


@pytest.mark.parametrize("policy", ["any", "quorum"])
async def test_a_plan_that_is_not_sure_misses_a_later_one(three, policy):
    graph = DegradedGraph(three, policy, plan="fast")
    graph.first.row = UNSURE
    graph.third.raises = NotReadyError("gone")
    answer = await graph.classify()
    assert list(answer.members) == ["first", "second"]
    assert answer.missing_members == {"third": "not_ready"}
    graph.first.row = SURE
    answer = await graph.classify()
    assert (answer.degraded, answer.skipped_members) == (False, ["second", "third"])
