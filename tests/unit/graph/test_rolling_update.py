"""A Gateway whose stages are of another model set: what it cannot answer goes to a sibling."""

import asyncio
import gc
import pickle
from typing import Any, cast

import numpy as np
import pytest

from app.errors import NotReadyError, OtherSetError
from app.graph import availability
from app.graph.availability import ForwardingGraph
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest, TensorRequest
from app.serve.gateway import Gateway
from app.settings import Settings
from app.stages.classifier import Classifier
from app.stages.combiner import Combiner
from app.stages.decoder import Decoder
from models.errors import TandemError
from models.model_set import load_model_set
from tests.support.fakes import (
    FakeCombiner,
    FakeDecoder,
    FakeMember,
    handle_of,
    of_model_set,
    service_of,
)
from tests.support.tiny_networks import picture, write_tiny_set


def request_of(*files: bytes, is_probe: bool = False) -> ClassifyRequest:
    return ClassifyRequest(
        list(files),
        3,
        10.0,
        "id",
        RequestObserver(),
        lane="bulk",
        may_skip=False,
        is_probe=is_probe,
    )


class Scripted:
    """A graph, or a sibling, that gives what it is told to, one thing after another."""

    def __init__(self, *gives: object) -> None:
        self._gives = list(gives)
        self.asked: list[tuple] = []

    async def __call__(self, *fields: object) -> object:
        self.asked.append(fields)
        given = self._gives.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    async def handle_forwarded(self, *fields: object) -> object:
        return await self(*fields)

    run = __call__


class Mute(Scripted):
    """Loses its first reply."""

    async def handle_forwarded(self, *fields: object) -> object:
        if not self.asked:
            self.asked.append(fields)
            await asyncio.Event().wait()
        return await self(*fields)


MIXED = OtherSetError("mixed")


def siblings(graph: Scripted, sibling: Scripted | None, monkeypatch) -> ForwardingGraph:
    made = ForwardingGraph(cast("Any", graph))
    if sibling is not None:
        monkeypatch.setattr(made, "_peer", lambda: handle_of(sibling))
    return made


async def test_without_an_update_no_sibling_is_asked(monkeypatch):
    sibling = Scripted()
    assert await siblings(Scripted(["ours"]), sibling, monkeypatch).run(request_of()) == ["ours"]
    assert sibling.asked == []


async def test_a_sibling_takes_over_with_everything_of_the_request(monkeypatch):
    sibling = Scripted(["theirs"])
    asked = siblings(Scripted(MIXED), sibling, monkeypatch).run(request_of(b"a", b"b"))
    assert await asked == ["theirs"]
    ((forwarded,),) = sibling.asked
    assert (forwarded.files, forwarded.top_k) == ([b"a", b"b"], 3)
    assert (forwarded.request_id, forwarded.lane) == ("id", "bulk")
    assert 9 < forwarded.left_s <= 10
    again = pickle.loads(pickle.dumps(forwarded))  # its clock starts anew
    assert (again.files, again.top_k, again.lane) == ([b"a", b"b"], 3, "bulk")
    assert again.timeout_s == forwarded.timeout_s <= 10


async def test_a_sibling_takes_over_a_request_of_tensors(monkeypatch):
    tensors = TensorRequest(np.zeros((2, 8, 8, 3), np.uint8), "resnet50")
    sibling = Scripted(["theirs"])
    request = request_of()._replace(tensors=tensors)
    assert await siblings(Scripted(MIXED), sibling, monkeypatch).run(request) == ["theirs"]
    ((forwarded,),) = sibling.asked
    again = pickle.loads(pickle.dumps(forwarded))
    assert (again.num_images, again.tensors.member) == (2, "resnet50")


async def test_it_goes_on_until_somebody_can(monkeypatch):
    graph, sibling = Scripted(MIXED, MIXED, ["ours"]), Scripted(MIXED, MIXED)
    assert await siblings(graph, sibling, monkeypatch).run(request_of()) == ["ours"]
    assert len(sibling.asked) == 2


@pytest.mark.parametrize("second", ["answers", "is of another set"])
async def test_a_sibling_whose_reply_is_lost_is_asked_again(monkeypatch, second):
    monkeypatch.setattr(availability, "PATIENCE_S", 0.01)
    sibling = Mute(*[["theirs"]] if second == "answers" else [MIXED, ["theirs"]])
    graph = Scripted(MIXED, MIXED)
    async with asyncio.timeout(10):
        assert await siblings(graph, sibling, monkeypatch).run(request_of()) == ["theirs"]
    assert len(sibling.asked) == (2 if second == "answers" else 3)


async def test_a_second_call_costs_as_many_images_as_the_request_has(monkeypatch):
    monkeypatch.setattr(availability, "PATIENCE_S", 0.01)
    forwarding = siblings(Scripted(MIXED), Mute(["theirs"]), monkeypatch)
    pixels = np.zeros((64, 8, 8, 3), np.uint8)
    request = request_of()._replace(tensors=TensorRequest(pixels))
    assert await forwarding.run(request) == ["theirs"]
    assert not forwarding._hedge_budget.spend(1)


@pytest.mark.parametrize("error", [NotReadyError("down"), TandemError("?")])
async def test_other_errors_are_told(monkeypatch, error):
    with pytest.raises(type(error)):
        await siblings(Scripted(error), Scripted(), monkeypatch).run(request_of())
    with pytest.raises(type(error)):
        await siblings(Scripted(MIXED), Scripted(error), monkeypatch).run(request_of())


async def test_a_probe_asks_after_the_gateways_own_stages(monkeypatch):
    sibling = Scripted(["theirs"])
    with pytest.raises(OtherSetError):
        await siblings(Scripted(MIXED), sibling, monkeypatch).run(request_of(is_probe=True))
    assert sibling.asked == []


async def test_outside_of_serve_there_are_no_siblings(monkeypatch):
    with pytest.raises(OtherSetError):
        await siblings(Scripted(MIXED), None, monkeypatch).run(request_of())


@pytest.fixture
def two_sets(tmp_path) -> tuple[Settings, Settings]:
    """Sets of the same size and labels, which only differ in one network."""
    folders = (
        write_tiny_set(tmp_path / name, gains={"sure": gain}, name="tiny")
        for name, gain in (("old", 8.0), ("new", 6.0))
    )
    old, new = (Settings(model_set=str(f), batch_sizes=(1,), compile_cache=None) for f in folders)
    return old, new


def test_fingerprints_tell_sets_apart(two_sets):
    prints = [load_model_set(s.model_set).fingerprint() for s in (*two_sets, two_sets[0])]
    assert prints[0] == prints[2] != prints[1]
    assert all(len(p) == 12 for p in prints)


@pytest.mark.parametrize("stage", ["decoder", "member", "combiner"])
async def test_an_answer_is_of_one_set_alone(two_sets, stage):
    """One stage of the new set among those of the old one: refused, whichever it is."""
    old, new = two_sets
    of = {name: new if name == stage else old for name in ("decoder", "member", "combiner")}
    service = service_of(
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
    members = {name: FakeMember() for name in ("first", "second", "third")}
    settings = Settings(model_set=str(tiny_set), member_patience_s=0.0, answer_policy=policy)
    service = service_of(settings, FakeDecoder(), members, FakeCombiner())
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


async def test_a_member_refuses_images_of_another_size(tmp_path):
    settings = Settings(
        model_set=str(write_tiny_set(tmp_path / "tiny", size=24)),
        batch_sizes=(1,),
        compile_cache=None,
    )
    small = (await Decoder(settings).decode([picture()])).images[:, :16, :16]
    with pytest.raises(OtherSetError):
        await Classifier(settings, "sure").classify(small, 10.0)


async def test_a_combiner_refuses_members_that_it_does_not_know(tiny_set):
    combiner = Combiner(Settings(model_set=str(tiny_set)))
    with pytest.raises(OtherSetError, match="members here: other; a rolling update is under way"):
        await combiner.combine({"other": np.zeros((1, 3), np.float32)}, 1)


async def test_a_gateway_is_not_healthy_before_its_members_answer(tiny_set, monkeypatch):
    member = FakeMember()
    member.raises = NotReadyError("still loading")
    settings = Settings(model_set=str(tiny_set))
    decoder, combiner = FakeDecoder(), FakeCombiner()
    of_model_set(settings, decoder, member, combiner)
    gateway = Gateway(
        settings, handle_of(decoder), {"sure": handle_of(member)}, handle_of(combiner)
    )
    monkeypatch.setattr("app.graph.availability.START_POLL_S", 0)
    check = asyncio.create_task(gateway.check_health())
    while len(member.asked) < 3:
        await asyncio.sleep(0)
    assert not check.done()
    member.raises = None
    await check
    num_asked = len(member.asked)
    await gateway.check_health()
    assert len(member.asked) == num_asked
