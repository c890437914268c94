"""Pictures to evaluate on."""

from pathlib import Path

import pytest

from tests.support.tiny_networks import write_pictures


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 pictures, every one what its folder says."""
    return write_pictures(tmp_path_factory.mktemp("data") / "eval", num_per_color=7)
