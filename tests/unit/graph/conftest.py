"""A service with a response cache, for the tests of the graph behind it."""

import pytest

from tests.support.cached_service import Cached


@pytest.fixture
def cached(tiny_set) -> Cached:
    return Cached(tiny_set)
