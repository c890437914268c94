"""The set, the calibration images and the validation images of these tests."""

import pytest

from tests.support.tiny_networks import write_pictures, write_tiny_set


@pytest.fixture
def folder(tmp_path):
    """A set with float networks only."""
    return write_tiny_set(tmp_path / "tiny", precision="FP16", num_convolutions=1)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("data") / "calibration", num_per_color=5)


@pytest.fixture
def validation(tmp_path):
    return write_pictures(tmp_path / "validation", num_per_color=6, side=20)
