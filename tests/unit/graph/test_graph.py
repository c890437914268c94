"""The Gateway's way through the stages, which are plain objects here."""

import asyncio
import time
from importlib.metadata import version
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from app.answers import Classified
from app.errors import DeadlineError, NotReadyError, OverloadedError
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.settings import Settings
from models.errors import ModelSetError
from tests.support.fakes import (
    NOT_AN_IMAGE,
    FakeCombiner,
    FakeDecoder,
    FakeMember,
    arrived,
    service_of,
)
from tests.support.hand_clock import HandClock
from tests.support.tiny_networks import LABELS


class Graph:
    """The service with its fake stages within reach."""

    def __init__(self, tiny_set, *, as_handles: bool = False) -> None:
        self.decoder, self.combiner = FakeDecoder(), FakeCombiner()
        self.members = {"sure": FakeMember((0.1, 0.8, 0.1)), "unsure": FakeMember((0.2, 0.5, 0.3))}
        settings = Settings(model_set=str(tiny_set))
        stages = (self.decoder, self.members, self.combiner)
        self.service = service_of(settings, *stages, as_handles=as_handles)

    async def classify(self, *files: bytes, top_k: int = 2, timeout_s: float = 10.0):
        return await self.service.classify(
            ClassifyRequest(list(files), top_k, timeout_s, "id", arrived())
        )


@pytest.fixture
def graph(tiny_set) -> Graph:
    return Graph(tiny_set)


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
    assert stages == [
        ("read", None),
        ("decode", None),
        ("queue", "sure"),
        ("infer", "sure"),
        ("queue", "unsure"),
        ("infer", "unsure"),
        ("combine", None),
    ]


async def test_members_that_disagree(graph):
    graph.members["sure"].row = (0.9, 0.1, 0.0)
    (answer,) = await graph.classify(b"good")
    assert not answer.agreement
    assert answer.members["sure"].label == LABELS[0]
    assert answer.members["unsure"].label == LABELS[1]


async def test_one_bad_file_among_good_ones(graph):
    first, bad, last = await graph.classify(b"good", b"bad", b"good!")
    assert isinstance(first, Classified)
    assert bad == NOT_AN_IMAGE
    assert isinstance(last, Classified)
    assert graph.members["sure"].asked[0][0] == 2  # the bad one never reached a member


async def test_when_all_are_bad_no_member_is_asked(graph):
    assert await graph.classify(b"bad", b"worse") == [NOT_AN_IMAGE, NOT_AN_IMAGE]
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


async def test_a_member_gets_the_time_that_is_left(graph):
    await graph.classify(b"good", timeout_s=3.0)
    ((_, left),) = graph.members["sure"].asked
    assert 0 < left <= 3.0


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


@pytest.mark.parametrize(
    ("raised", "expected", "says"),
    [
        (BackPressureError(10, 10), OverloadedError, "try again in a second"),
        (remote(OverloadedError("512 queued")), OverloadedError, "512 queued"),
        (remote(DeadlineError("too late")), DeadlineError, "too late"),
        (remote(ModelSetError("a file is missing")), ModelSetError, "a file is missing"),
        (remote(RuntimeError("secret")), NotReadyError, r"\(RuntimeError\); try again"),
        (TaskCancelledError(), DeadlineError, "cancelled"),
        (ActorDiedError(), NotReadyError, "ActorDiedError"),
        (
            DeploymentUnavailableError(DeploymentID("gone")),
            NotReadyError,
            "DeploymentUnavailableError",
        ),
    ],
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


LATE_S = 0.05


class LateMember(FakeMember):
    """A member of this process, of whose answer a busy loop hears late."""

    def classify(self, images, left_s, lane="interactive") -> Any:
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
    graph.service = service_of(Settings(model_set=str(tiny_set)), *stages)
    (answer,) = await graph.classify(b"good")
    (queued,) = [s for s in answer.timings_ms.stages if (s.stage, s.member) == ("queue", "sure")]
    assert queued.start_ms <= answer.timings_ms.total - LATE_S * 1e3
