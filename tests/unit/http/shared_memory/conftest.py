"""The service's HTTP interface in front of members of the test, with regions of shared memory."""

import pytest

from tests.support.open_inference import Graph, client_of
from tests.support.shared_regions import Memory


@pytest.fixture
def memory(tmp_path) -> Memory:
    return Memory(tmp_path)


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def client(graph, memory):
    return client_of(graph, memory.regions)
