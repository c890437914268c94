"""Fixtures that every test may use."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

SHARED_DATA = Path(
    os.environ.get("TANDEM_TEST_DATA", Path(__file__).parents[2] / "shared" / "data")
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SHARED_DATA.is_dir():
        return
    absent = [item for item in items if item.get_closest_marker("shared_data")]
    items[:] = [item for item in items if item not in absent]
    config.hook.pytest_deselected(items=absent)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    return SHARED_DATA


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Find a port of the loopback interface that nobody listens on."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find
