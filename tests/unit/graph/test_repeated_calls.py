"""Calls made again: after a death, but not for ever; a second one; by a Gateway's siblings."""

import asyncio
import pickle
from typing import Any, cast

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from app.errors import NotReadyError, OtherSetError, OverloadedError
from app.graph import availability
from app.graph.availability import MAX_CALLS, MOST_SAVED, PER_IMAGE, HedgeBudget, hedged, retry
from app.graph.request import ClassifyRequest, TensorRequest
from app.telemetry.metrics import RequestObserver
from models.errors import TandemError
from tests.support import fakes
from tests.support.cases import cases
from tests.support.virtual_loop import virtually

SOON, NEVER_S = 0.01, 30.0
DEATHS = [ActorUnavailableError("Actor is unavailable.", b"\0" * 16), ActorDiedError()]


class Calls:
    """Each call does what its turn says: an answer, an error, or a time for which it hangs."""

    def __init__(self, *turns: str | Exception | float) -> None:
        self.turns, self.num_made, self.num_cancelled = turns, 0, 0

    async def __call__(self) -> str:
        turn = self.turns[self.num_made]
        self.num_made += 1
        if isinstance(turn, Exception):
            raise turn
        if isinstance(turn, str):
            return turn
        try:
            await asyncio.sleep(turn)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return f"after {turn} s"


@cases(
    "turns, after_s, answer, num_made, num_cancelled",
    (("first", "second"), NEVER_S, "first", 1, 0),
    ((NEVER_S, "second"), SOON, "second", 2, 1),
    ((5 * SOON, NEVER_S), SOON, "after 0.05 s", 2, 1),  # the first may still answer first
    ((5 * SOON, ValueError("second")), SOON, "after 0.05 s", 2, 0),
    ((SOON, "second"), 0.0, "after 0.01 s", 1, 0),  # no time for a second call
    ((SOON, "second"), -1.0, "after 0.01 s", 1, 0),
)
@virtually
async def test_a_call_that_hangs_is_made_again_and_who_is_late_is_cancelled(
    turns, after_s, answer, num_made, num_cancelled
):
    calls = Calls(*turns)
    assert await hedged(calls, after_s, HedgeBudget(), 1) == answer
    await asyncio.sleep(0)
    assert (calls.num_made, calls.num_cancelled) == (num_made, num_cancelled)


async def test_an_early_error_is_raised_and_not_asked_for_again():
    calls = Calls(ValueError("early"), "second")
    with pytest.raises(ValueError, match="early"):
        await hedged(calls, NEVER_S, HedgeBudget(), 1)
    assert calls.num_made == 1


@virtually
async def test_if_both_fail_there_is_an_error():
    num_made = 0

    async def call() -> str:
        nonlocal num_made
        num_made += 1
        number = num_made
        await asyncio.sleep(3 * SOON)
        raise ValueError(f"call {number}")

    with pytest.raises(ValueError, match="call 2"):
        await hedged(call, SOON, HedgeBudget(), 1)


@virtually
async def test_a_caller_that_goes_takes_both_along():
    calls = Calls(NEVER_S, NEVER_S)
    task = asyncio.create_task(hedged(calls, SOON, HedgeBudget(), 1))
    while calls.num_made < 2:
        await asyncio.sleep(SOON)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert (calls.num_made, calls.num_cancelled) == (2, 2)


@virtually
async def test_without_budget_there_is_no_second_call():
    budget = HedgeBudget()
    while budget.spend(1):
        pass
    calls = Calls(5 * SOON, "second")
    assert await hedged(calls, SOON, budget, 1) == "after 0.05 s"
    assert calls.num_made == 1


def spent(budget: HedgeBudget, num_images: int) -> int:
    """Make a call that hangs; return how many images its second one has."""
    budget.earn(num_images)
    return num_images if budget.spend(num_images) else 0


def test_the_budget_is_a_share_of_the_images():
    """Every call of a stage that has too much to do hangs."""
    budget = HedgeBudget()
    num_spent = sum(spent(budget, 1) for _ in range(1000))
    assert num_spent == pytest.approx(1000 * PER_IMAGE + MOST_SAVED, abs=2)


def test_large_forms_get_no_larger_a_share():
    """Fifty photos a second are answered in time, and a form of 64 is late."""
    budget, num_spent = HedgeBudget(), 0
    for _ in range(100):
        for _ in range(50):
            budget.earn(1)
        num_spent += spent(budget, 64)
    assert 64 < num_spent <= 100 * (50 + 64) * PER_IMAGE + MOST_SAVED + 64


def test_a_form_that_is_larger_than_what_is_saved_is_asked_for_again():
    budget = HedgeBudget()
    assert (spent(budget, 64), spent(budget, 1)) == (64, 0)


class Dying:
    """Fails ``num_deaths`` times, then answers."""

    def __init__(self, num_deaths: int, error: Exception) -> None:
        self.num_deaths, self.error, self.num_calls = num_deaths, error, 0

    async def __call__(self) -> str:
        self.num_calls += 1
        if self.num_calls <= self.num_deaths:
            raise self.error
        return "answer"


@pytest.mark.parametrize("error", DEATHS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("num_deaths", range(MAX_CALLS))
async def test_a_death_is_no_error_while_calls_are_left(error, num_deaths):
    call = Dying(num_deaths, error)
    assert await retry(call, pause_s=lambda: 0) == "answer"
    assert call.num_calls == num_deaths + 1


async def test_what_kills_every_replica_is_given_up():
    call = Dying(100, DEATHS[0])
    with pytest.raises(ActorUnavailableError):
        await retry(call, pause_s=lambda: 0)
    assert call.num_calls == MAX_CALLS


@cases("error", OverloadedError("full"), RayTaskError("f", "trace", ValueError()), TimeoutError())
async def test_an_error_that_the_stage_raised_is_not_asked_for_twice(error):
    call = Dying(1, error)
    with pytest.raises(type(error)):
        await retry(call, pause_s=lambda: 0)
    assert call.num_calls == 1


async def test_after_a_death_the_call_can_be_another():
    calls: list[str] = []

    async def together() -> str:
        calls.append("together")
        raise DEATHS[1]

    async def alone() -> str:
        calls.append("alone")
        raise DEATHS[1]

    with pytest.raises(ActorDiedError):
        await retry(together, alone, pause_s=lambda: 0)
    assert calls == ["together", "alone", "alone"]


MIXED = OtherSetError("mixed")


def request_of(*files: bytes, is_probe: bool = False) -> ClassifyRequest:
    asked = ClassifyRequest(list(files), 3, 10.0, "id", RequestObserver(), lane="bulk")
    return asked._replace(is_probe=is_probe)


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


def siblings(graph, sibling, monkeypatch):
    made = availability.ForwardingGraph(cast("Any", graph))
    if sibling is not None:
        monkeypatch.setattr(made, "_peer", lambda: fakes.handle_of(sibling))
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
    assert await forwarding.run(request_of()._replace(tensors=TensorRequest(pixels))) == ["theirs"]
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
