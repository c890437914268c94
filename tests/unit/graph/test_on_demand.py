"""A graph that is let go and loaded again: who waits, for how long, and for how many loads."""

import asyncio
import gc
import logging
import time
import weakref
from typing import Any

import pytest

from app.errors import NotReadyError, UnknownModelError
from app.graph.availability import FAILED_FOR_S, OnDemandGraph, run_in_time
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest, RequestAnswers
from models.errors import ModelSetError
from tests.support.hand_clock import HandClock
from tests.support.steps import settle

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
def graph(loads: Loads, clock: HandClock) -> OnDemandGraph:
    unload: Any = loads.unload  # of fake graphs
    return OnDemandGraph("b", loads.loaded[0], loads.load, unload, AFTER_S, clock)


def request(timeout_s: float = 10.0, *, is_probe: bool = False) -> ClassifyRequest:
    return ClassifyRequest([b"x"], 1, timeout_s, "id", RequestObserver(), is_probe=is_probe)


async def let_go(graph: OnDemandGraph, clock: HandClock) -> None:
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


async def test_it_is_never_let_go_without_a_time(loads, clock):
    graph = OnDemandGraph("b", loads.loaded[0], loads.load, loads.unload, None, clock)
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
        await run_in_time(graph, hasty)
    loads.gate.set()
    assert await patient == []
    assert loads.num_begun == 1


async def test_a_loop_that_was_busy_until_the_end_says_the_same(graph, loads, clock):
    """Both times are over when the loop comes to look: that for the load and the request's own."""
    await let_go(graph, clock)
    loads.gate.clear()
    hasty = asyncio.create_task(run_in_time(graph, request(0.05)))
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
    clock.now += FAILED_FOR_S
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
