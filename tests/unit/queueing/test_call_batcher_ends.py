"""What one caller's end, an error or a call that hangs means for the others."""

import asyncio

import pytest

from app.queueing.call_batcher import HOLDS_BACK_S
from tests.support.batched_stage import (
    CALLS_PER_REPLICA,
    Stage,
    busy,
    busy_again,
    end_all,
    request,
    turn,
)
from tests.support.virtual_loop import run_virtually


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
