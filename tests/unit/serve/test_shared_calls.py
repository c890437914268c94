"""What leaves together, and what waits.

What one caller's end, an error or a call that hangs means for the others.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.serve.shared_calls import ALONE_BYTES, HOLDS_BACK_S, MAX_CALL_BYTES
from tests.support.batched_stage import (
    CALLS_PER_REPLICA,
    MAX_IMAGES,
    Stage,
    busy,
    busy_again,
    end_all,
    request,
    turn,
)
from tests.support.virtual_loop import run_virtually


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    await end_all(stage)


async def test_a_lone_image_leaves_at_once(stage: Stage) -> None:
    (answer,) = stage.ask("a")
    await turn()
    assert stage.calls == [["a"]]
    stage.ends[0].set_result(None)
    assert await answer == "a!"


async def test_what_comes_in_one_turn_of_the_loop_leaves_together(stage: Stage) -> None:
    answers = stage.ask("a", "b", "c")
    await turn()
    assert stage.calls == [["a", "b", "c"]]
    stage.ends[0].set_result(None)
    assert await asyncio.gather(*answers) == ["a!", "b!", "c!"]


async def test_what_comes_while_calls_are_under_way_leaves_when_one_ends(
    stage: Stage,
) -> None:
    await busy(stage)
    for name in "abc":
        stage.ask(name)
        await turn()
    assert len(stage.calls) == CALLS_PER_REPLICA
    stage.ends[0].set_result(None)
    await turn()
    assert stage.calls[CALLS_PER_REPLICA:] == [["a", "b", "c"]]


async def test_each_replica_may_have_calls_under_way(stage: Stage) -> None:
    stage.num_replicas = 2
    for number in range(3 * CALLS_PER_REPLICA):
        stage.ask(str(number))
        await turn()
    assert len(stage.calls) == 2 * CALLS_PER_REPLICA


@pytest.mark.parametrize("num_over", [0, 3])
async def test_a_full_call_does_not_wait(stage: Stage, num_over: int) -> None:
    await busy(stage)
    stage.ask(*map(str, range(MAX_IMAGES + num_over)))
    await turn()
    assert [len(call) for call in stage.calls[CALLS_PER_REPLICA:]] == [MAX_IMAGES]


@pytest.mark.parametrize(("num_waiting", "leaving"), [(1, 1), (3, 3), (4, 4), (6, 4), (7, 4)])
async def test_a_call_has_the_size_of_a_batch(stage: Stage, num_waiting: int, leaving: int) -> None:
    """What fills no size leaves as it is: by itself each image would pay for a call."""
    await busy(stage)
    stage.ask(*map(str, range(num_waiting)))
    await turn()
    stage.ends[0].set_result(None)
    await turn()
    assert [len(call) for call in stage.calls[CALLS_PER_REPLICA:]] == [leaving]


async def test_requests_of_many_images_share_a_call_as_far_as_they_fit(stage: Stage) -> None:
    await busy(stage)
    stage.ask("a", "b", "c", images=MAX_IMAGES // 2 - 1)
    await turn()
    assert stage.calls[CALLS_PER_REPLICA:] == [["a", "b"]]
    stage.ends[0].set_result(None)
    await turn()
    assert stage.calls[CALLS_PER_REPLICA + 1 :] == []  # two are under way, as before


async def test_a_call_has_no_more_bytes_than_may_be(stage: Stage) -> None:
    each = ALONE_BYTES
    for number in range(5):
        stage.batcher.submit(str(number), 1, each, "interactive")
    await turn()
    assert [len(call) for call in stage.calls] == [
        MAX_CALL_BYTES // each,
        5 - MAX_CALL_BYTES // each,
    ]


async def test_what_is_large_leaves_alone_whatever_is_under_way(stage: Stage) -> None:
    await busy(stage)
    stage.batcher.submit("large", 1, ALONE_BYTES + 1, "interactive")
    stage.batcher.submit("second", 1, 10, "bulk", is_alone=True)
    await turn()
    assert stage.calls[CALLS_PER_REPLICA:] == [["large"], ["second"]]
    assert stage.alone == [False] * CALLS_PER_REPLICA + [True, True]
    for end in stage.ends:
        end.set_result(None)
    await turn()
    await busy_again(stage)


async def test_lanes_share_no_call_and_hold_each_other_back_in_nothing(stage: Stage) -> None:
    stage.ask("photo", "other photo")
    stage.ask("form", lane="bulk")
    await turn()
    assert stage.calls == [["photo", "other photo"], ["form"]]
    assert stage.lanes == ["interactive", "bulk"]
    await asyncio.gather(*(turn() for _ in range(2)))
    stage.ask("second form", lane="bulk")
    await turn()
    stage.ask("third form", lane="bulk")  # waits
    stage.ask("third photo")
    await turn()
    assert stage.calls[2:] == [["second form"], ["third photo"]]


async def test_an_error_of_one_is_no_error_of_the_others(stage: Stage) -> None:
    answers = stage.ask("a", "b", "c")
    await turn()
    stage.ends[0].set_result(["a!", ValueError("b"), "c!"])
    found = await asyncio.gather(*answers, return_exceptions=True)
    assert [str(one) for one in found] == ["a!", "b", "c!"]
    assert isinstance(found[1], ValueError)


async def test_an_error_of_the_call_is_one_of_all_its_parts(stage: Stage) -> None:
    answers = stage.ask("a", "b")
    await turn()
    stage.ends[0].set_exception(ConnectionError("gone"))
    found = await asyncio.gather(*answers, return_exceptions=True)
    assert [type(one) for one in found] == [ConnectionError] * 2
    await busy_again(stage)


async def test_a_caller_that_goes_away_ends_no_call_of_others(stage: Stage) -> None:
    first, second = stage.ask("a", "b")
    await turn()
    first.cancel()
    await turn()
    assert stage.num_ended == 0
    stage.ends[0].set_result(None)
    assert await second == "b!"


async def test_a_call_ends_with_the_last_of_its_callers(stage: Stage) -> None:
    answers = stage.ask("a", "b")
    await turn()
    for answer in answers:
        answer.cancel()
    await turn()
    assert stage.num_ended == 1
    await busy_again(stage)


async def test_who_goes_away_while_waiting_is_not_sent(stage: Stage) -> None:
    await busy(stage)
    gone, stays = stage.ask("gone", "stays")
    gone.cancel()
    stage.ends[0].set_result(None)
    await turn()
    assert stage.calls[CALLS_PER_REPLICA:] == [["stays"]]
    assert not stays.done()


async def test_a_call_that_is_ended_from_outside_ends_its_callers(stage: Stage) -> None:
    (answer,) = stage.ask("a")
    await turn()
    stage.ends[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    await busy_again(stage)


def test_calls_that_take_too_long_hold_back_no_others() -> None:
    async def run() -> None:
        stage = Stage()
        await busy(stage)
        stage.ask("waits")
        await asyncio.sleep(HOLDS_BACK_S * 0.9)
        assert len(stage.calls) == CALLS_PER_REPLICA
        await asyncio.sleep(HOLDS_BACK_S * 0.2)
        assert stage.calls[CALLS_PER_REPLICA:] == [["waits"]]
        for end in stage.ends:
            end.set_result(None)
        await turn()
        await busy_again(stage)
        await end_all(stage)

    run_virtually(run())


async def test_a_call_runs_in_no_requests_context(stage: Stage) -> None:
    request.set("mine")
    stage.ask("a")
    await turn()
    stage.batcher.submit("b", 1, 1, "interactive", is_alone=True)
    await turn()
    assert stage.contexts == ["none", "none"]
