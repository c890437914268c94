"""Pictures to evaluate on, and sets with made evaluations."""

import pytest

from tests.support.calibration.made_evaluations import HOSTILE, model_set_of
from tests.support.tiny_networks import write_pictures


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """21 pictures, every one what its folder says."""
    return write_pictures(tmp_path_factory.mktemp("data") / "eval", num_per_color=7)


@pytest.fixture
def both(tmp_path):
    """A set with float and INT8 networks."""
    return model_set_of(tmp_path / "set")


@pytest.fixture
def hostile(tmp_path):
    """A set whose labels are markup."""
    return model_set_of(tmp_path / "set", HOSTILE)
