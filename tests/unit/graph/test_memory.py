"""What the store says that it takes is what it takes."""

import gc
import tracemalloc

import numpy as np
import pytest

from app.graph.request import ResponseCache

MIB = 2**20


@pytest.mark.slow  # make test counts payload, in tests/unit/caching
@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_the_bound_is_of_memory_and_not_of_payload(num_classes):
    """A store that is full and has evicted as much again: keys, objects, tables and all."""
    cache = ResponseCache(2 * MIB)
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
