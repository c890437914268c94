"""The set that the tests of its changes begin with."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(tiny_set, tmp_path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(tiny_set, tmp_path / "sets" / "tiny"))
