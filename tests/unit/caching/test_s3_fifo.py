"""The store's bound, and what its policy keeps."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.caching.s3_fifo import ENTRY_BYTES, GHOST_BYTES, MAX_HITS, S3Fifo

BOUNDED = settings(max_examples=300, database=None)
SIZE = 100  # of a value, in bytes, where a test does not say otherwise
COST = SIZE + ENTRY_BYTES
KEY = st.integers(0, 30)
STEP = st.one_of(
    st.tuples(st.just("get"), KEY, st.just(0)), st.tuples(st.just("put"), KEY, st.integers(0, 4000))
)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def store_of(num_entries: float) -> S3Fifo[int]:
    return S3Fifo(int(num_entries * COST))


def taken(store: S3Fifo) -> int:
    """Count anew what the store counts as it goes."""
    entries = [*store._small.values(), *store._main.values()]
    return sum(entry.num_bytes for entry in entries) + GHOST_BYTES * len(store._ghosts)


@BOUNDED
@given(steps=st.lists(STEP, max_size=200), max_bytes=st.integers(0, 20_000))
def test_whatever_comes_the_bound_holds_and_answers_are_right(steps, max_bytes):
    store: S3Fifo[tuple[int, int]] = S3Fifo(max_bytes)
    last: dict[int, tuple[int, int]] = {}
    for number, (what, name, size) in enumerate(steps):
        if what == "put":
            last[name] = (name, number)
            store.put(key(name), last[name], size)
            fits = size + ENTRY_BYTES <= max_bytes
            assert (store.get(key(name)) == last[name]) is fits
        else:
            found = store.get(key(name))
            assert found is None or found == last[name], "an old value, or another key's"
            assert (found is not None) == (key(name) in store)
        assert store.num_bytes == taken(store) <= max_bytes
        assert not store._small.keys() & store._main.keys()
        assert not store._ghosts.keys() & (store._small.keys() | store._main.keys())
        assert len(store._ghosts) <= len(store)
        assert all(entry.num_hits <= MAX_HITS for entry in store._small.values())


@BOUNDED
@given(numbers=st.lists(KEY, max_size=100))
def test_what_fits_is_never_evicted(numbers):
    store = store_of(31)
    for number in numbers:
        store.put(key(number), number, SIZE)
    assert all(store.get(key(number)) == number for number in numbers)
    assert store.num_evicted == 0


def test_what_is_asked_for_again_outlives_a_scan():
    store = store_of(100)
    for number in range(50):
        store.put(key(number), number, SIZE)
        store.get(key(number))
    for number in range(1000, 3000):
        store.put(key(number), number, SIZE)
    assert sum(key(number) in store for number in range(50)) == 50


def test_a_new_value_of_a_key_that_was_asked_for_outlives_a_scan() -> None:
    store = store_of(100)
    for number in range(50):
        store.put(key(number), number, SIZE)
        store.get(key(number))
        store.put(key(number), -number, SIZE)
    for number in range(1000, 3000):
        store.put(key(number), number, SIZE)
    assert [store.get(key(number)) for number in range(50)] == [-number for number in range(50)]


def test_what_comes_again_soon_after_it_had_to_go_stays():
    store = store_of(100)
    for number in range(120):
        store.put(key(number), number, SIZE)
    gone = [number for number in range(120) if key(number) not in store]
    again = gone[-1]
    assert store.get(key(again)) is None
    store.put(key(again), again, SIZE)
    for number in range(1000, 1090):  # a scan, as long as the store
        store.put(key(number), number, SIZE)
    assert key(again) in store


def test_what_is_no_longer_asked_for_goes_at_last():
    store = store_of(100)
    for number in range(100):
        store.put(key(number), number, SIZE)
        store.get(key(number))
    for number in range(1000, 1300):
        store.put(key(number), number, SIZE)
        store.get(key(number))
    assert not any(key(number) in store for number in range(100))


def test_a_new_value_takes_the_old_ones_place():
    store = store_of(3)
    store.put(key(1), 1, SIZE)
    store.put(key(1), 2, SIZE)
    assert (store.get(key(1)), len(store), store.num_bytes) == (2, 1, COST)


def test_what_is_larger_than_the_store_is_not_kept_and_moves_nothing():
    store = store_of(3)
    store.put(key(1), 1, SIZE)
    store.put(key(2), 2, 4 * COST)
    assert key(2) not in store
    assert key(1) in store
    store.put(key(1), 3, 4 * COST)  # and the old value must not be taken for the new one
    assert store.get(key(1)) is None


@pytest.mark.parametrize("skew", [0.8, 1.0, 1.2])
def test_it_hits_more_often_than_lru_when_scans_pass(skew):
    """Zipf's law over 2,000 images, a store of 200, and a scan of 300 others now and then."""
    draw = random.Random(1)
    weights = [1 / rank**skew for rank in range(1, 2001)]
    asked: list[int] = []
    for turn in range(20):
        asked += draw.choices(range(2000), weights, k=1000)
        asked += range(10_000 + 300 * turn, 10_300 + 300 * turn)
    store = S3Fifo[int](200 * COST)
    num_hits = 0
    for number in asked:
        if store.get(key(number)) is None:
            store.put(key(number), number, SIZE)
        else:
            num_hits += 1
    assert num_hits > lru_hits(asked, 200)


def lru_hits(asked: list[int], num_entries: int) -> int:
    kept: dict[int, None] = {}
    num_hits = 0
    for number in asked:
        num_hits += number in kept
        kept.pop(number, None)
        kept[number] = None
        if len(kept) > num_entries:
            del kept[next(iter(kept))]
    return num_hits
