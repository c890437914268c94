"""A set that a store has; each test has a cache of its own, and none waits."""

import pytest

from tests.support.tiny_networks import write_tiny_set


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds between tries."""
    waits: list[float] = []
    monkeypatch.setattr("models.stores.time.sleep", waits.append)
    return waits


@pytest.fixture
def shop(tmp_path, monkeypatch, waits):
    """The folder that the store has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_tiny_set(tmp_path / "shop" / "tiny")
