"""Whether a set can answer: networks loaded on demand, readiness, rolling updates."""

import asyncio
import gc
import logging
import time
import weakref
from typing import Any

import cv2
import numpy as np
import pytest

from app.errors import (
    DeadlineError,
    NotReadyError,
    OtherSetError,
    OverloadedError,
    UnknownModelError,
)
from app.graph import availability
from app.graph.request import ClassifyRequest, RequestAnswers
from app.settings import Settings
from app.stages.classifier import Classifier
from app.stages.combiner import Combiner
from app.stages.decoder import Decoder
from app.telemetry.metric_table import ANSWERS, ENTROPY
from app.telemetry.metrics import RequestObserver
from models.errors import ModelSetError
from tests.support import fakes
from tests.support.cases import cases
from tests.support.hand_clock import HandClock
from tests.support.steps import settle
from tests.support.tiny_networks import picture, write_tiny_set

AFTER_S = 60.0


class FakeGraph:
    """Answers nothing, once it may."""

    def __init__(self, number: int) -> None:
        self.number, self.gate = number, asyncio.Event()
        self.gate.set()

    async def run(self, request: ClassifyRequest) -> RequestAnswers:
        await self.gate.wait()
        return []


class Loads:
    """Builds graphs as fast as a test lets it."""

    def __init__(self) -> None:
        self.gate, self.error = asyncio.Event(), None
        self.gate.set()
        self.num_begun = 0
        self.loaded: list[FakeGraph] = [FakeGraph(0)]
        self.unloaded: list[FakeGraph] = []

    async def load(self) -> FakeGraph:
        self.num_begun += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.loaded.append(FakeGraph(self.num_begun))
        return self.loaded[-1]

    async def unload(self, graph: FakeGraph) -> None:
        self.unloaded.append(graph)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def loads() -> Loads:
    return Loads()


@pytest.fixture
def graph(loads: Loads, clock: HandClock) -> availability.OnDemandGraph:
    unload: Any = loads.unload  # of fake graphs
    return availability.OnDemandGraph("b", loads.loaded[0], loads.load, unload, AFTER_S, clock)


def request(timeout_s: float = 10.0, *, is_probe: bool = False) -> ClassifyRequest:
    return ClassifyRequest([b"x"], 1, timeout_s, "id", RequestObserver(), is_probe=is_probe)


def request_of(*files: bytes) -> ClassifyRequest:
    return request()._replace(files=list(files))


async def let_go(graph: availability.OnDemandGraph, clock: HandClock) -> None:
    clock.now += AFTER_S
    graph.unload_idle()
    await settle()
    assert not graph.is_loaded


async def test_it_is_let_go_when_nobody_has_asked_for_long_enough(graph, loads, clock):
    clock.now += AFTER_S - 1
    await graph.run(request())
    clock.now += AFTER_S - 0.001
    graph.unload_idle()
    assert graph.is_loaded
    await graph.run(request(is_probe=True))  # the service's own: nobody asks
    clock.now += 0.001
    graph.unload_idle()
    await settle()
    assert not graph.is_loaded
    assert loads.unloaded == loads.loaded


async def test_a_load_waits_until_the_memory_of_what_is_let_go_is_free(graph, loads, clock):
    frees = asyncio.Event()

    async def unload(_: object) -> None:
        await frees.wait()

    graph._unload_graph = unload
    await let_go(graph, clock)
    asked = asyncio.create_task(graph.run(request()))
    await settle()
    assert loads.num_begun == 0
    frees.set()
    await asked
    assert loads.num_begun == 1


async def test_it_is_never_let_go_without_a_time(loads, clock):
    graph = availability.OnDemandGraph("b", loads.loaded[0], loads.load, loads.unload, None, clock)
    clock.now += 1e9
    graph.unload_idle()
    assert graph.is_loaded


async def test_it_stays_while_a_request_is_being_answered(graph, loads, clock):
    loads.loaded[0].gate.clear()
    running = asyncio.create_task(graph.run(request(1e9)))
    await settle()
    clock.now += 2 * AFTER_S
    graph.unload_idle()
    assert graph.is_loaded
    loads.loaded[0].gate.set()
    await running
    graph.unload_idle()  # its answer was a sign of use
    assert graph.is_loaded


async def test_requests_at_once_wait_for_one_load(graph, loads, clock):
    await let_go(graph, clock)
    loads.gate.clear()
    waiting = [asyncio.create_task(graph.run(request())) for _ in range(5)]
    waiting.append(asyncio.create_task(graph.load()))
    await settle()
    assert not any(task.done() for task in waiting)
    loads.gate.set()
    await asyncio.gather(*waiting)
    assert loads.num_begun == 1
    assert graph.is_loaded


async def test_one_that_cannot_wait_is_told_to_come_back_and_the_load_goes_on(graph, loads, clock):
    await let_go(graph, clock)
    loads.gate.clear()
    patient = asyncio.create_task(graph.run(request()))
    hasty = request(0.05)
    with pytest.raises(
        NotReadyError, match=r"loading the model set 'b' takes longer .* 0\.05 s; try again"
    ):
        await availability.run_in_time(graph, hasty)
    loads.gate.set()
    assert await patient == []
    assert loads.num_begun == 1


async def test_a_loop_that_was_busy_until_the_end_says_the_same(graph, loads, clock):
    """Both times are over when the loop comes to look: that for the load and the request's own."""
    await let_go(graph, clock)
    loads.gate.clear()
    hasty = asyncio.create_task(availability.run_in_time(graph, request(0.05)))
    await settle()
    time.sleep(0.06)
    with pytest.raises(NotReadyError, match="loading the model set"):
        await hasty
    loads.gate.set()
    await graph.load()


async def test_one_that_goes_away_stops_no_load(graph, loads, clock):
    await let_go(graph, clock)
    loads.gate.clear()
    gone = asyncio.create_task(graph.run(request()))
    await settle()
    gone.cancel()
    await settle()
    loads.gate.set()
    await graph.run(request())
    assert loads.num_begun == 1


async def test_a_load_that_fails_is_not_tried_by_every_request(graph, loads, clock, caplog):
    await let_go(graph, clock)
    loads.error = ModelSetError("/models/b/x.bin was altered")
    with caplog.at_level(logging.ERROR), pytest.raises(NotReadyError) as raised:
        await graph.run(request())
    assert "log says why" in raised.value.message
    assert "/models" not in raised.value.message  # whoever asks need not know the folders
    assert "/models/b/x.bin was altered" in caplog.text
    assert graph.problem is not None
    assert graph.problem.message == raised.value.message
    with pytest.raises(NotReadyError):
        await graph.run(request())
    assert loads.num_begun == 1
    loads.error = None
    clock.now += availability.FAILED_FOR_S
    assert graph.problem is None
    assert await graph.run(request()) == []
    assert loads.num_begun == 2
    assert graph.problem is None


async def test_who_asks_for_a_load_gets_one_at_once_whatever_failed_before(graph, loads, clock):
    await let_go(graph, clock)
    loads.error = OSError("disk")
    for number in (1, 2):
        with pytest.raises(NotReadyError):
            await graph.load()
        assert loads.num_begun == number
    loads.error = None
    await graph.load()
    assert graph.is_loaded
    assert await graph.run(request()) == []


@pytest.mark.parametrize("ask", ["run", "load"])
async def test_refused_requests_are_not_kept(graph, loads, clock, ask):
    """An error that is raised again and again has the frames of all of them in its traceback."""
    await let_go(graph, clock)
    loads.error = OSError("disk")

    async def refused() -> weakref.ref[RequestObserver]:
        asked = request()
        with pytest.raises(NotReadyError, match="cannot be loaded"):
            await (graph.run(asked) if ask == "run" else graph.load())
        return weakref.ref(asked.observer)

    observers = [await refused() for _ in range(20)]
    gc.collect()
    assert [observer() for observer in observers] == [None] * 20


async def test_a_probe_loads_nothing(graph, loads, clock):
    await let_go(graph, clock)
    with pytest.raises(NotReadyError, match="not in memory"):
        await graph.run(request(is_probe=True))
    assert loads.num_begun == 0


async def test_once_closed_it_is_never_loaded_again(graph, loads):
    await graph.close()
    assert loads.unloaded == loads.loaded
    with pytest.raises(UnknownModelError, match="'b' was unloaded"):
        await graph.run(request())
    assert loads.num_begun == 0


async def test_closed_in_the_middle_of_a_load_nothing_stays(graph, loads, clock):
    await let_go(graph, clock)
    loads.gate.clear()
    waiting = asyncio.create_task(graph.run(request()))
    await settle()
    closing = asyncio.create_task(graph.close())
    await settle()
    loads.gate.set()
    with pytest.raises(UnknownModelError):
        await waiting
    await closing
    assert loads.unloaded == loads.loaded
    assert not graph.is_loaded


# Readiness: one warm-up image however many ask, remembered for a while, never for long.


@pytest.fixture
def hand_clock(monkeypatch) -> HandClock:
    hand_clock = HandClock()
    monkeypatch.setattr(availability, "time", hand_clock)
    return hand_clock


@pytest.fixture
def member() -> fakes.FakeMember:
    return fakes.FakeMember()


@pytest.fixture
def service(tiny_set, member, hand_clock):
    settings = Settings(model_set=str(tiny_set))
    return fakes.service_of(settings, fakes.FakeDecoder(), {"sure": member}, fakes.FakeCombiner())


def test_the_warm_up_image_is_one():
    image = cv2.imdecode(np.frombuffer(availability.WARM_UP_IMAGE, np.uint8), cv2.IMREAD_UNCHANGED)
    assert image.shape == (1, 1)


async def test_a_hundred_that_ask_at_once_cause_one_probe_which_none_ends_that_leaves(
    service, member
):
    member.gate = asyncio.Event()
    leaving, *staying = (asyncio.ensure_future(service.check_ready()) for _ in range(100))
    while not member.asked:
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    member.gate.set()
    await asyncio.gather(*staying)
    assert leaving.cancelled()
    assert len(member.asked) == 1


@cases(
    "error, says",
    (RuntimeError("out of memory"), "RuntimeError: out of memory"),
    (OverloadedError("512 images are queued"), "was refused: 512 images"),  # never answered
)
async def test_an_error_of_the_warm_up_image_is_not_ready(service, member, error, says):
    member.raises = error
    with pytest.raises(NotReadyError, match=says):
        await service.check_ready()


async def test_the_answer_is_remembered_and_then_asked_again(service, member, hand_clock):
    answered_at = hand_clock.now
    await service.check_ready()
    hand_clock.now = answered_at + availability.READY_FOR_S - 0.001
    await service.check_ready()
    assert len(member.asked) == 1
    hand_clock.now = answered_at + availability.READY_FOR_S
    await service.check_ready()
    assert len(member.asked) == 2


async def test_a_member_that_stops_answering_is_noticed_and_its_return_too(
    service, member, hand_clock
):
    await service.check_ready()
    member.raises = NotReadyError("down")
    hand_clock.now += availability.READY_FOR_S + 1
    for _ in range(2):  # a failure is not remembered
        with pytest.raises(NotReadyError, match="the warm-up image got no answer: down"):
            await service.check_ready()
    member.raises = None
    await service.check_ready()
    assert len(member.asked) == 4


async def test_a_service_that_is_merely_full_stays_ready(service, member, hand_clock):
    """Taken out by a balancer it would make the others' load worse, which is its own."""
    await service.check_ready()
    member.raises = OverloadedError("512 images are queued")
    hand_clock.now += availability.READY_FOR_S + 1
    await service.check_ready()
    member.raises = DeadlineError("it hangs")
    with pytest.raises(NotReadyError, match="it hangs"):
        await service.check_ready()


async def test_requests_that_are_answered_are_probes_enough(service, member, hand_clock):
    await service.classify(request_of(b"good"))
    await service.check_ready()
    assert len(member.asked) == 1
    hand_clock.now += availability.READY_FOR_S + 1
    await service.classify(request_of(b"no image"))
    await service.check_ready()  # a bad file tells nothing of the members
    assert len(member.asked) == 2


async def test_answers_without_a_member_are_not(tiny_set, hand_clock):
    members = {"sure": fakes.FakeMember(), "unsure": fakes.FakeMember()}
    settings = Settings(model_set=str(tiny_set), answer_policy="any", member_patience_s=0)
    service = fakes.service_of(settings, fakes.FakeDecoder(), members, fakes.FakeCombiner())
    members["unsure"].raises = NotReadyError("down")
    await service.classify(request_of(b"good"))
    await service.check_ready()
    assert len(members["sure"].asked) == 2


@cases(
    "policy, num_down, is_ready",
    *(("all", 0, True), ("all", 1, False), ("quorum", 1, True), ("quorum", 2, False)),
    *(("any", 2, True), ("any", 3, False)),
)
async def test_it_is_ready_while_as_many_members_answer_as_the_policy_wants(
    tiny_set, policy, num_down, is_ready
):
    members = {name: fakes.FakeMember() for name in ("first", "second", "third")}
    settings = Settings(model_set=str(tiny_set), answer_policy=policy, member_patience_s=0)
    service = fakes.service_of(settings, fakes.FakeDecoder(), members, fakes.FakeCombiner())
    for member in list(members.values())[:num_down]:
        member.raises = NotReadyError("down")
    if is_ready:
        await service.check_ready()
    else:
        with pytest.raises(NotReadyError, match="down"):
            await service.check_ready()


async def test_a_decoder_that_refuses_the_warm_up_image(service, monkeypatch):
    monkeypatch.setattr(availability, "WARM_UP_IMAGE", b"something else")
    with pytest.raises(NotReadyError, match="the warm-up image failed: these bytes"):
        await service.check_ready()


async def test_a_probe_is_nobodys_photo(service, told):
    await service.check_ready()
    assert told.of(ANSWERS) == {}
    await service.classify(request_of(b"good"))
    version = service.served_models().model_version
    assert told.of(ANSWERS) == {("alone", "no", "unknown", version): 1}
    assert told.of(ENTROPY) == {(): 0.5}


# Stages of another model set.


@pytest.fixture
def two_sets(tmp_path) -> tuple[Settings, Settings]:
    """Sets of the same size and labels, which only differ in one network."""
    folders = (
        write_tiny_set(tmp_path / name, gains={"sure": gain}, name="tiny")
        for name, gain in (("old", 8.0), ("new", 6.0))
    )
    old, new = (Settings(model_set=str(f), batch_sizes=(1,), compile_cache=None) for f in folders)
    return old, new


@pytest.mark.parametrize("stage", ["decoder", "member", "combiner"])
async def test_an_answer_is_of_one_set_alone(two_sets, stage):
    """One stage of the new set among those of the old one: refused, whichever it is."""
    old, new = two_sets
    of = {name: new if name == stage else old for name in ("decoder", "member", "combiner")}
    service = fakes.service_of(
        old,
        Decoder(of["decoder"]),
        {"sure": Classifier(of["member"], "sure")},
        Combiner(of["combiner"]),
        as_handles=True,
    )
    with pytest.raises(OtherSetError):
        await service.classify(request_of(picture()))


@pytest.mark.parametrize("is_known_by", ["error", "answer"])
@pytest.mark.parametrize("policy", ["all", "any"])
async def test_a_member_of_another_set_hides_no_failure(tiny_set, policy, is_known_by):
    """Circuits open as always, and no error is left for asyncio to log."""
    unretrieved: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, event: unretrieved.append(event))
    members = {name: fakes.FakeMember() for name in ("first", "second", "third")}
    settings = Settings(model_set=str(tiny_set), member_patience_s=0.0, answer_policy=policy)
    service = fakes.service_of(settings, fakes.FakeDecoder(), members, fakes.FakeCombiner())
    if is_known_by == "error":
        members["first"].raises = OtherSetError("mixed")
    members["first"].fingerprint = "other"
    members["second"].raises = RuntimeError("no memory")
    members["third"].raises = OtherSetError("mixed too")
    with pytest.raises(OtherSetError):
        await service.classify(request_of(b"good"))
    graph: Any = service._graph
    breakers = vars(graph)["members"].breakers
    assert [name for name, breaker in breakers.items() if breaker.is_open] == ["second"]
    for member in members.values():
        member.raises = None  # its traceback keeps the calls, which report when they are freed
    gc.collect()
    assert unretrieved == []
