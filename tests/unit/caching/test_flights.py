"""Computations that several wait for: one does it, and nobody is left waiting."""

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from app.caching.response_cache import ImageFlight, Lookup, ResponseCache
from app.caching.values import Outcome

SIZE = 64 * 2**10
RESULT = Outcome(np.ones((1, 2), np.float32))


def flight_of(kept: Lookup) -> ImageFlight:
    assert kept.flight is not None
    return kept.flight


def test_the_first_does_it_and_the_others_wait():
    cache = ResponseCache(SIZE)
    first, second = (cache.look(b"a", "interactive") for _ in range(2))
    assert (first.is_own, second.is_own) == (True, False)
    assert second.flight is first.flight
    assert cache.look(b"b", "interactive").is_own
    assert len(cache._flights) == 2


async def test_what_it_comes_to_is_for_all_and_it_is_forgotten():
    cache = ResponseCache(SIZE)
    own = flight_of(cache.look(b"a", "bulk"))
    waits = [asyncio.create_task(cache.look(b"a", "bulk").flight.ended.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    cache.end(own, RESULT)
    await asyncio.gather(*waits)
    assert own.value is RESULT
    assert len(cache._flights) == 0
    cache.end(own, None)  # as a "finally" does
    assert own.value is RESULT


async def test_a_waiter_that_goes_disturbs_nobody():
    cache = ResponseCache(SIZE)
    own = flight_of(cache.look(b"a", "bulk"))
    leaves, stays = (asyncio.create_task(own.ended.wait()) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.sleep(0)
    assert leaves.cancelled()
    cache.end(own, RESULT)
    await stays


def test_interactive_does_not_wait_for_bulk():
    cache = ResponseCache(SIZE)
    bulk = cache.look(b"a", "bulk")
    interactive = cache.look(b"a", "interactive")
    assert interactive.is_own
    assert cache.look(b"a", "bulk").flight is interactive.flight
    cache.end(flight_of(bulk), RESULT)  # which is not the one that is under way now
    assert not cache.look(b"a", "interactive").is_own
    assert bulk.flight.value is RESULT
    assert not interactive.flight.ended.is_set()


ERRORS = {"fails": ValueError, "cancelled": asyncio.CancelledError}
OUTCOME = st.sampled_from(["value", "fails", "cancelled", "answered"])


@settings(max_examples=200, database=None)
@given(outcomes=st.lists(OUTCOME, min_size=1, max_size=12))
def test_however_computations_end_everybody_ends(outcomes):
    """Each caller, if it must compute, ends as ``outcomes`` say; none waits for ever."""

    async def play() -> list[str]:
        cache = ResponseCache(SIZE)
        computed: list[int] = []

        async def call(number: int) -> str:
            while True:
                joined = cache.look(b"a", "interactive")
                if joined.is_own:
                    return await compute(number, flight_of(joined))
                await joined.flight.ended.wait()
                if joined.flight.value is not None:
                    return "shared"
                if joined.flight.was_answered:
                    return "alone"

        async def compute(number: int, flight: ImageFlight) -> str:
            computed.append(number)
            try:
                await asyncio.sleep(0)
                if (error := ERRORS.get(outcomes[number])) is not None:
                    raise error
                value = RESULT if outcomes[number] == "value" else None
                cache.end(flight, value, answered=True)
                return outcomes[number]
            finally:
                cache.end(flight)

        calls = [asyncio.create_task(call(number)) for number in range(len(outcomes))]
        async with asyncio.timeout(10):
            await asyncio.wait(calls)
        assert len(cache._flights) == 0
        assert computed == list(range(len(computed))), "the next one takes over"
        return ["ended" if c.cancelled() or c.exception() else c.result() for c in calls]

    ended = asyncio.run(play())
    good = [n for n, outcome in enumerate(outcomes) if outcome in ("value", "answered")]
    first = good[0] if good else len(outcomes)
    assert ended[:first] == ["ended"] * first
    if good:
        after = {"value": "shared", "answered": "alone"}[outcomes[first]]
        assert ended[first + 1 :] == [after] * (len(outcomes) - first - 1)
