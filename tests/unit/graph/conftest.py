"""A service with a response cache, for the tests of the graph behind it."""

import pytest

from tests.support.cached_service import Cached
from tests.support.plans import planned
from tests.support.tiny_networks import write_tiny_set


@pytest.fixture
def cached(tiny_set) -> Cached:
    return Cached(tiny_set)


@pytest.fixture(scope="module")
def with_plan(tmp_path_factory):
    folder = write_tiny_set(tmp_path_factory.mktemp("sets") / "tiny")
    return planned(folder, (("sure",), 0.7), (("unsure",), None))
