"""A set to change, and no proxy between a test and its server."""

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(tiny_set: Path, tmp_path: Path) -> Path:
    """A copy of a set that may be changed."""
    return Path(shutil.copytree(tiny_set, tmp_path / "sets" / "tiny"))


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
