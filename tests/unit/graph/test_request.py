"""A request's parameters, and the cache of one process."""

import asyncio
import gc
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import BadParameterError
from app.graph import request
from app.graph.redis_cache import Outcome
from tests.support.cases import cases

KIB = 2**10
KEYS = [bytes([number]) * 32 for number in range(64)]
SIZE = 64 * KIB
RESULT = Outcome(np.ones((1, 2), np.float32))
PUTS = st.tuples(st.just("put"), st.integers(0, 30), st.integers(0, 1000))
GETS = st.tuples(st.just("get"), st.integers(0, 30), st.just(0))
ERRORS = {"fails": ValueError, "cancelled": asyncio.CancelledError}
OUTCOME = st.sampled_from(["value", "fails", "cancelled", "answered"])
MIB = 2**20


def rows() -> np.ndarray:
    return np.full((2, 64), 0.5, np.float32)  # 512 bytes


@settings(max_examples=300, database=None)
@given(steps=st.lists(PUTS | GETS, max_size=200), max_bytes=st.integers(0, 20_000))
def test_the_store_keeps_the_most_recently_used_that_fit(steps, max_bytes):
    """Compares the store with a list of (key, rows), the most recently used last."""
    store, num_evicted = request.RowStore(max_bytes), 0
    kept: list[tuple[int, np.ndarray]] = []
    for what, number, size in steps:
        used = [rows for key, rows in kept if key == number]
        kept = [entry for entry in kept if entry[0] != number]
        if what == "get":
            assert store.get(KEYS[number]) is (used[0] if used else None)
            kept += [(number, rows) for rows in used]
            continue
        rows = np.zeros((1, size), np.float32)
        store.put(KEYS[number], rows)
        kept += [(number, rows)] if rows.nbytes + request.ENTRY_BYTES <= max_bytes else []
        while taken(kept) > max_bytes:
            del kept[0]
            num_evicted += 1
        assert (store.num_bytes, store.num_evicted) == (taken(kept), num_evicted)
    assert all(store.get(KEYS[number]) is rows for number, rows in kept)


def taken(kept: list[tuple[int, np.ndarray]]) -> int:
    return sum(rows.nbytes + request.ENTRY_BYTES for _, rows in kept)


def test_rows_larger_than_the_store_take_the_old_ones_away_and_evict_nothing():
    store = request.RowStore(2 * (rows().nbytes + request.ENTRY_BYTES))
    for key in KEYS[:2]:
        store.put(key, rows())
    store.put(KEYS[1], np.zeros((2, 4096), np.float32))  # the old rows are no answer any more
    assert store.get(KEYS[0]) is not None
    assert store.get(KEYS[1]) is None
    assert store.num_evicted == 0


def test_each_eviction_is_counted_once():
    cache = request.ResponseCache(8 * KIB)
    for key in KEYS:
        cache.keep(key, rows())
    left = sum(cache.read(key) is not None for key in KEYS)
    assert cache.num_bytes <= 8 * KIB
    assert 0 < left < len(KEYS)
    assert (cache.take_evicted(), cache.take_evicted()) == (len(KEYS) - left, 0)


def test_interactive_does_not_wait_for_bulk():
    cache = request.ResponseCache(SIZE)
    bulk, _ = cache.join(b"a", "bulk")
    interactive, is_new = cache.join(b"a", "interactive")
    assert is_new
    assert cache.join(b"a", "bulk") == (interactive, False)
    cache.end(bulk, RESULT)  # which is not the one that is under way now
    assert not cache.join(b"a", "interactive")[1]
    assert bulk.value is RESULT
    assert not interactive.ended.is_set()


@settings(max_examples=200, database=None)
@given(outcomes=st.lists(OUTCOME, min_size=1, max_size=12))
def test_however_computations_end_everybody_ends(outcomes):
    """Each caller, if it must compute, ends as ``outcomes`` say; none waits for ever."""

    async def play() -> list[str]:
        cache = request.ResponseCache(SIZE)
        computed: list[int] = []

        async def call(number: int) -> str:
            while True:
                flight, is_new = cache.join(b"a", "interactive")
                if is_new:
                    return await compute(number, flight)
                await flight.ended.wait()
                if flight.value is not None:
                    return "shared"
                if flight.was_answered:
                    return "alone"

        async def compute(number: int, flight: request.ImageFlight) -> str:
            computed.append(number)
            try:
                await asyncio.sleep(0)
                if (error := ERRORS.get(outcomes[number])) is not None:
                    raise error
                cache.end(flight, RESULT if outcomes[number] == "value" else None, answered=True)
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


def test_an_endless_top_k_is_not_repeated_whole() -> None:
    with pytest.raises(BadParameterError) as caught:
        request.checked_top_k(10**4000, 3)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(("given", "seconds"), [("2", 2.0), ("0.25", 0.25), (" 1e-3 ", 0.001)])
def test_a_time(given: str, seconds: float) -> None:
    assert request.parse_timeout_s(given) == seconds


@cases("given", "", "soon", "0", "-1", "nan", "5_0", "1e1_0", "\u0665", "x" * 10_000)
def test_a_time_that_is_none(given: str) -> None:
    with pytest.raises(BadParameterError, match="give seconds as a number above 0") as caught:
        request.parse_timeout_s(given)
    assert len(str(caught.value)) < 150


@cases(
    "priority, num_images, lane",
    *((asked, 1, "interactive") for asked in (None, "i", "urgent", "xu=7")),
    *((asked, 5, "interactive") for asked in ("u=3", "u=0, i")),
    *((asked, 1, "bulk") for asked in ("i, u=7", "u = 4")),
    *((asked, 3, "bulk") for asked in (None, "")),
)
def test_who_gets_into_which_lane(priority, num_images, lane):
    assert request.lane_of(priority, num_images) == lane


@pytest.mark.parametrize("priority", ["u=8", "u=99999999999999999999999999"])
def test_an_urgency_that_is_none(priority):
    with pytest.raises(BadParameterError, match="0 to 7"):
        request.lane_of(priority, 1)


@given(st.text(max_size=40), st.integers(1, 64))
@settings(max_examples=300, deadline=None)
def test_any_header_is_a_lane_or_refused(priority, num_images):
    try:
        assert request.lane_of(priority, num_images) in ("interactive", "bulk")
    except BadParameterError:
        assert "u" in priority


@pytest.mark.parametrize("threshold", [None, 0.01, 0.5, 0.999])
def test_a_threshold_of_a_multi_label_set(threshold: float | None) -> None:
    assert request.checked_threshold(threshold, is_multi_label=True) == threshold


@pytest.mark.parametrize("threshold", [0.0, 1.0, -3.0, math.nan, math.inf])
def test_a_threshold_outside_of_the_scores(threshold: float) -> None:
    with pytest.raises(BadParameterError, match=r"threshold is .*above 0 and below 1"):
        request.checked_threshold(threshold, is_multi_label=True)


def test_a_threshold_of_classes_that_exclude_each_other() -> None:
    assert request.checked_threshold(None, is_multi_label=False) is None
    with pytest.raises(BadParameterError, match=r"threshold is 0\.5; .* leave it out"):
        request.checked_threshold(0.5, is_multi_label=False)


# Cache-Control of a request.


@cases(
    "header, use",
    *((header, "use") for header in (None, "", "max-age=0", "private, x-no-store")),
    (", ,NO-STORE;", "use"),  # no directive that there is
    *((header, "renew") for header in ("no-cache", "No-Cache", "no-cache=x")),
    ("max-age=0,no-cache", "renew"),
    *((header, "off") for header in ("no-store", " no-store ")),
    *((header, "off") for header in ("no-cache, no-store", "no-store, no-cache")),
)
def test_what_a_client_allows(header, use):
    assert request.cache_use_of(header) == use


# What the store says that it takes is what it takes.


@pytest.mark.slow  # make test counts payload, in the tests above
@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_the_bound_is_of_memory_and_not_of_payload(num_classes):
    """A store that is full and has evicted as much again: keys, objects, tables and all."""
    cache = request.ResponseCache(2 * MIB)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        number = 0
        while cache.take_evicted() == 0 or number % 4096:
            rows = np.full((2, num_classes), 0.5, np.float32)
            cache.keep(number.to_bytes(32, "big"), rows)
            number += 1
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.num_bytes <= 2 * MIB
    assert after - before <= 2 * MIB
    assert after - before > MIB / 2  # and the bound is used
