"""Photographs to learn from, and a cache of the test's own."""

import pytest

from tests.support.calibration.noisy_pictures import write_noisy


@pytest.fixture(autouse=True)
def own_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def photographs(tmp_path):
    """A folder for each of three colours, with twelve pictures in each."""
    return write_noisy(tmp_path / "photographs", 12)
