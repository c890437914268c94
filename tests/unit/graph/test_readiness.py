"""Readiness: one warm-up image however many ask, remembered for a while, never for long."""

import asyncio

import cv2
import numpy as np
import pytest

import app.graph.availability
from app.errors import DeadlineError, NotReadyError, OverloadedError
from app.graph.availability import READY_FOR_S, WARM_UP_IMAGE
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.graph.service import EnsembleService
from app.settings import Settings
from app.telemetry.metric_table import ANSWERS, ENTROPY
from tests.support.fakes import FakeCombiner, FakeDecoder, FakeMember, service_of
from tests.support.hand_clock import HandClock


@pytest.fixture
def clock(monkeypatch) -> HandClock:
    clock = HandClock()
    monkeypatch.setattr(app.graph.availability, "time", clock)
    return clock


@pytest.fixture
def member() -> FakeMember:
    return FakeMember()


@pytest.fixture
def service(tiny_set, member, clock) -> EnsembleService:
    settings = Settings(model_set=str(tiny_set))
    return service_of(settings, FakeDecoder(), {"sure": member}, FakeCombiner())


def test_the_warm_up_image_is_one():
    image = cv2.imdecode(np.frombuffer(WARM_UP_IMAGE, np.uint8), cv2.IMREAD_UNCHANGED)
    assert image.shape == (1, 1)


async def test_a_hundred_that_ask_at_once_cause_one_probe(service, member):
    member.gate = asyncio.Event()
    asking = [asyncio.ensure_future(service.check_ready()) for _ in range(100)]
    while not member.asked:
        await asyncio.sleep(0)
    member.gate.set()
    await asyncio.gather(*asking)
    assert len(member.asked) == 1


async def test_an_error_of_a_runtime_is_not_ready(service, member):
    member.raises = RuntimeError("out of memory")
    with pytest.raises(NotReadyError, match="RuntimeError: out of memory"):
        await service.check_ready()


async def test_one_that_leaves_does_not_end_the_probe_of_the_others(service, member):
    member.gate = asyncio.Event()
    leaving, staying = (asyncio.ensure_future(service.check_ready()) for _ in range(2))
    while not member.asked:
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    member.gate.set()
    await staying
    assert leaving.cancelled()
    assert len(member.asked) == 1


async def test_a_start_waits_for_the_first_answer(service, member, monkeypatch):
    monkeypatch.setattr(app.graph.availability, "START_POLL_S", 0.0)
    member.raises = NotReadyError("starting")
    waiting = asyncio.ensure_future(service.wait_ready())
    while len(member.asked) < 3:  # it asks again and again
        await asyncio.sleep(0)
        assert not waiting.done()
    member.raises = None
    await waiting
    assert len(member.asked) == 4


async def test_the_answer_is_remembered_and_then_asked_again(service, member, clock):
    answered_at = clock.now
    await service.check_ready()
    clock.now = answered_at + READY_FOR_S - 0.001
    await service.check_ready()
    assert len(member.asked) == 1
    clock.now = answered_at + READY_FOR_S
    await service.check_ready()
    assert len(member.asked) == 2


async def test_a_member_that_stops_answering_is_noticed_and_its_return_too(service, member, clock):
    await service.check_ready()
    member.raises = NotReadyError("down")
    clock.now += READY_FOR_S + 1
    for _ in range(2):  # a failure is not remembered
        with pytest.raises(NotReadyError, match="the warm-up image got no answer: down"):
            await service.check_ready()
    member.raises = None
    await service.check_ready()
    assert len(member.asked) == 4


async def test_a_service_that_is_merely_full_stays_ready(service, member, clock):
    """Taken out by a balancer it would make the others' load worse, which is its own."""
    await service.check_ready()
    member.raises = OverloadedError("512 images are queued")
    clock.now += READY_FOR_S + 1
    await service.check_ready()
    member.raises = DeadlineError("it hangs")
    with pytest.raises(NotReadyError, match="it hangs"):
        await service.check_ready()


async def test_one_that_never_answered_is_not_ready_because_it_is_full(service, member):
    member.raises = OverloadedError("512 images are queued")
    with pytest.raises(NotReadyError, match="was refused: 512 images"):
        await service.check_ready()


async def test_requests_that_are_answered_are_probes_enough(service, member, clock):
    await service.classify(ClassifyRequest([b"good"], 1, 10.0, "id", RequestObserver()))
    await service.check_ready()
    assert len(member.asked) == 1
    clock.now += READY_FOR_S + 1
    await service.classify(ClassifyRequest([b"no image"], 1, 10.0, "id", RequestObserver()))
    await service.check_ready()  # a bad file tells nothing of the members
    assert len(member.asked) == 2


async def test_answers_without_a_member_are_not(tiny_set, clock):
    members = {"sure": FakeMember(), "unsure": FakeMember()}
    settings = Settings(model_set=str(tiny_set), answer_policy="any", member_patience_s=0)
    service = service_of(settings, FakeDecoder(), members, FakeCombiner())
    members["unsure"].raises = NotReadyError("down")
    await service.classify(ClassifyRequest([b"good"], 1, 10.0, "id", RequestObserver()))
    await service.check_ready()
    assert len(members["sure"].asked) == 2


@pytest.mark.parametrize(
    ("policy", "num_down", "is_ready"),
    [
        ("all", 0, True),
        ("all", 1, False),
        ("quorum", 1, True),
        ("quorum", 2, False),
        ("any", 2, True),
        ("any", 3, False),
    ],
)
async def test_it_is_ready_while_as_many_members_answer_as_the_policy_wants(
    tiny_set, policy, num_down, is_ready
):
    members = {name: FakeMember() for name in ("first", "second", "third")}
    settings = Settings(model_set=str(tiny_set), answer_policy=policy, member_patience_s=0)
    service = service_of(settings, FakeDecoder(), members, FakeCombiner())
    for member in list(members.values())[:num_down]:
        member.raises = NotReadyError("down")
    if is_ready:
        await service.check_ready()
    else:
        with pytest.raises(NotReadyError, match="down"):
            await service.check_ready()


async def test_a_decoder_that_refuses_the_warm_up_image(service, monkeypatch):
    monkeypatch.setattr(app.graph.availability, "WARM_UP_IMAGE", b"something else")
    with pytest.raises(NotReadyError, match="the warm-up image failed: these bytes"):
        await service.check_ready()


async def test_a_probe_is_nobodys_photo(service, told):
    await service.check_ready()
    assert told.of(ANSWERS) == {}
    await service.classify(ClassifyRequest([b"good"], 1, 10.0, "id", RequestObserver()))
    version = service.served_models().model_version
    assert told.of(ANSWERS) == {("alone", "no", "unknown", version): 1}
    assert told.of(ENTROPY) == {(): 0.5}
