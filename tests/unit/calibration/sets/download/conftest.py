"""A server of one file and the place that it is fetched to; no proxy between them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.calibration.downloaded import DATA
from tests.support.calibration.file_server import FileServer


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture
def files() -> Iterator[FileServer]:
    with FileServer(DATA) as running:
        yield running


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "cache" / "net.pth"


@pytest.fixture
def part(path) -> Path:
    """The file's place while it is fetched; its folder is there."""
    path.parent.mkdir()
    return path.with_name("net.pth.part")


@pytest.fixture
def waits() -> list[float]:
    return []
