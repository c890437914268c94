"""What tests of classifying offline share."""

import pytest

from tests.support.tiny_networks import write_pictures


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Nine pictures, and one file that is none."""
    folder = write_pictures(tmp_path_factory.mktemp("pictures"), 3)
    (folder / "bad.jpg").write_text("no image")
    return folder
