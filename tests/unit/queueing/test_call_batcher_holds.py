"""A call beside decoding: one that would be larger waits while no core of the node stands still."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from app.queueing import call_batcher
from app.queueing.call_batcher import HOLD_NEEDS_S, CallBatcher
from app.queueing.node_cores import NodeCores
from tests.support.batched_stage import MAX_IMAGES, SIZES, Stage, busy, end_all, turn
from tests.support.decoding import Decoding


@pytest.fixture
def decoding() -> Decoding:
    return Decoding()


@pytest.fixture
def cores(decoding: Decoding) -> NodeCores:
    return NodeCores(2, decoding)


@pytest.fixture
async def held(cores: NodeCores, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """A stage whose calls wait, and no wait of which ends by itself."""
    monkeypatch.setattr(call_batcher, "MAX_HOLD_S", 600.0)
    stage = Stage()
    stage.batcher = CallBatcher(stage._send, SIZES, lambda: 1, cores=cores)
    stage.batcher.calls_per_replica = 2
    yield stage
    cores._source.num_coming = 0
    cores._changed()
    await end_all(stage)


async def test_a_small_call_waits_for_what_is_decoded_while_all_cores_are_busy(
    held: Stage, decoding: Decoding, cores: NodeCores
) -> None:
    decoding.num_coming = 3
    with cores.call():  # of another member
        held.ask("a")
        await turn()
        assert held.calls == []
        for name in "bcd":
            held.ask(name)
            decoding.end()
            await turn()
    assert held.calls == [["a", "b", "c", "d"]]


async def test_it_leaves_when_a_core_would_be_idle(held: Stage, decoding: Decoding) -> None:
    decoding.num_coming = 2
    held.ask("a")
    await turn()
    assert held.calls == []
    decoding.end()  # a fault: no image comes of it
    await turn()
    assert held.calls == [["a"]]


async def test_a_members_call_keeps_a_core_busy(
    held: Stage, decoding: Decoding, cores: NodeCores
) -> None:
    decoding.num_coming = 1
    with cores.call():
        held.ask("a")
        await turn()
        assert held.calls == []
    await turn()
    assert held.calls == [["a"]]


async def test_a_full_call_does_not_wait(held: Stage, decoding: Decoding) -> None:
    decoding.num_coming = 5
    held.ask(*map(str, range(MAX_IMAGES)))
    await turn()
    assert [len(call) for call in held.calls] == [MAX_IMAGES]


async def test_what_would_not_grow_does_not_wait(held: Stage, decoding: Decoding) -> None:
    decoding.num_coming = 2
    held.ask(*"abcd")  # with two more, four would leave as well
    await turn()
    assert held.calls == [["a", "b", "c", "d"]]


async def test_what_is_alone_does_not_wait(held: Stage, decoding: Decoding) -> None:
    decoding.num_coming = 5
    held.batcher.submit_alone("alone", 1, 1000, "interactive")
    await turn()
    assert held.calls == [["alone"]]


async def test_nothing_waits_past_its_time(held: Stage, decoding: Decoding) -> None:
    decoding.num_coming = 5
    soon = time.monotonic() + HOLD_NEEDS_S / 2
    held.batcher.submit("soon", 1, 1000, "interactive", soon)
    await turn()
    assert held.calls == [["soon"]]


async def test_a_wait_ends_and_the_next_call_may_wait_again(
    held: Stage, decoding: Decoding
) -> None:
    decoding.num_coming = 5
    held.ask("a")
    await turn()
    held.batcher._lanes["interactive"].hold._is_over()
    await turn()
    assert held.calls == [["a"]]
    held.ask("b")
    await turn()
    assert held.calls == [["a"]]


async def test_what_waits_in_one_lane_leaves_though_the_other_has_left(
    held: Stage, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_batcher, "MAX_HOLD_S", 0.01)
    decoding.num_coming = 5
    held.ask("photo")
    held.ask(*map(str, range(MAX_IMAGES)), lane="bulk")
    await turn()
    assert [len(call) for call in held.calls] == [MAX_IMAGES]
    async with asyncio.timeout(30):
        while ["photo"] not in held.calls:
            await asyncio.sleep(0.005)


async def test_without_cores_of_its_own_nothing_waits(stage: Stage) -> None:
    await busy(stage)
    stage.ends[0].set_result(None)
    stage.ask("a")
    await turn()
    assert stage.calls[-1] == ["a"]
