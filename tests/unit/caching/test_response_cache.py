"""The cache of responses: what is kept, what is computed once, and what had to go."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from app.caching.redis_store import RedisStore
from app.caching.response_cache import ResponseCache
from app.caching.values import Outcome

KIB = 2**10
KEYS = [bytes([number]) * 32 for number in range(64)]


def rows() -> np.ndarray:
    return np.full((2, 64), 0.5, np.float32)  # 512 bytes


def test_what_is_kept_is_there_for_the_next_request():
    cache, kept = ResponseCache(64 * KIB), rows()
    cache.keep(KEYS[0], kept)
    assert cache.look(KEYS[0], "interactive").rows is kept
    assert cache.look(KEYS[1], "interactive").rows is None


def test_the_first_who_asks_computes_and_the_others_wait():
    cache = ResponseCache(64 * KIB)
    first, second = (cache.look(KEYS[0], "interactive") for _ in range(2))
    assert (first.is_own, second.is_own) == (True, False)
    assert first.flight is not None
    assert first.flight is second.flight
    cache.end(first.flight, Outcome(rows()))
    assert cache.look(KEYS[0], "interactive").is_own  # nothing was kept: it is computed anew


def test_each_eviction_is_counted_once():
    cache = ResponseCache(8 * KIB)
    for key in KEYS:
        cache.keep(key, rows())
    left = sum(cache.read(key) is not None for key in KEYS)
    assert cache.num_bytes <= 8 * KIB
    assert 0 < left < len(KEYS)
    assert cache.take_evicted() == len(KEYS) - left
    assert cache.take_evicted() == 0


class Shared:
    """As much of the shared store as is asked: it has the rows of some keys."""

    def __init__(self, kept: dict[bytes, np.ndarray]) -> None:
        self.kept = kept

    async def read(self, keys: Sequence[bytes]) -> list[np.ndarray | None]:
        return [self.kept.get(key) for key in keys]


async def test_what_others_kept_ends_the_computation_and_the_rest_is_left_to_do():
    kept = rows()
    cache = ResponseCache(64 * KIB, cast("RedisStore", Shared({KEYS[1]: kept})))
    flights = {n: cache.look(KEYS[n], "interactive").flight for n in (0, 1)}
    assert await cache.fetch({**flights, 2: None}) == {1: kept}
    assert [flights[n].ended.is_set() for n in (0, 1)] == [False, True]
    assert flights[1].value == Outcome(kept)
    assert cache.read(KEYS[1]) is kept
    assert cache.read(KEYS[0]) is None
