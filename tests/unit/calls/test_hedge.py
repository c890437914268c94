"""A second call for one that hangs: when it is made, which answer counts, how many there are."""

import asyncio

import pytest

from app.calls.hedge import MOST_SAVED, PER_CALL, HedgeBudget, hedged

SOON, NEVER_S = 0.01, 30.0


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


async def test_an_answer_in_time_is_asked_for_once():
    calls = Calls("first", "second")
    assert await hedged(calls, NEVER_S, HedgeBudget()) == "first"
    assert calls.num_made == 1


async def test_one_that_hangs_is_asked_for_again_and_cancelled():
    calls = Calls(NEVER_S, "second")
    assert await hedged(calls, SOON, HedgeBudget()) == "second"
    await asyncio.sleep(0)
    assert (calls.num_made, calls.num_cancelled) == (2, 1)


async def test_the_first_may_still_answer_first():
    calls = Calls(5 * SOON, NEVER_S)
    assert await hedged(calls, SOON, HedgeBudget()) == "after 0.05 s"
    await asyncio.sleep(0)
    assert (calls.num_made, calls.num_cancelled) == (2, 1)


async def test_an_early_error_is_raised_and_not_asked_for_again():
    calls = Calls(ValueError("early"), "second")
    with pytest.raises(ValueError, match="early"):
        await hedged(calls, NEVER_S, HedgeBudget())
    assert calls.num_made == 1


async def test_an_error_of_the_second_does_not_end_the_first():
    calls = Calls(5 * SOON, ValueError("second"))
    assert await hedged(calls, SOON, HedgeBudget()) == "after 0.05 s"


async def test_if_both_fail_there_is_an_error():
    async def call() -> str:
        nonlocal num_made
        num_made += 1
        number = num_made
        await asyncio.sleep(3 * SOON)
        raise ValueError(f"call {number}")

    num_made = 0
    with pytest.raises(ValueError, match="call 2"):
        await hedged(call, SOON, HedgeBudget())


async def test_a_caller_that_goes_takes_both_along():
    calls = Calls(NEVER_S, NEVER_S)
    task = asyncio.create_task(hedged(calls, SOON, HedgeBudget()))
    while calls.num_made < 2:
        await asyncio.sleep(SOON)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert (calls.num_made, calls.num_cancelled) == (2, 2)


@pytest.mark.parametrize("after_s", [0.0, -1.0])
async def test_without_time_there_is_no_second_call(after_s):
    calls = Calls(SOON, "second")
    assert await hedged(calls, after_s, HedgeBudget()) == f"after {SOON} s"
    assert calls.num_made == 1


async def test_without_budget_there_is_no_second_call():
    budget = HedgeBudget()
    while budget.spend():
        pass
    calls = Calls(5 * SOON, "second")
    assert await hedged(calls, SOON, budget) == "after 0.05 s"
    assert calls.num_made == 1


def test_the_budget_is_a_share_of_the_calls():
    budget = HedgeBudget()
    num_spent = 0
    for _ in range(1000):  # every call of a stage that has too much to do hangs
        budget.earn()
        num_spent += budget.spend()
    assert num_spent == pytest.approx(1000 * PER_CALL + MOST_SAVED, abs=2)
