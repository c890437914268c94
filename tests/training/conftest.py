"""Images for the tests that need torch."""

from pathlib import Path

import pytest

from tests.support.calibration.drawn_images import draw_folder


@pytest.fixture(scope="session")
def training_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("train"), 12, seed=1)


@pytest.fixture(scope="session")
def held_out_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("held_out"), 4, seed=2)
