"""Images for the tests that need torch."""

import pytest
import torch

from calibration.sets.convert import build_network
from tests.support.calibration.drawn_images import draw_folder


@pytest.fixture(scope="session")
def training_images(tmp_path_factory):
    return draw_folder(tmp_path_factory.mktemp("train"), 12, seed=1)


@pytest.fixture(scope="session")
def held_out_images(tmp_path_factory):
    return draw_folder(tmp_path_factory.mktemp("held_out"), 4, seed=2)


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    """A ResNet50 of three classes, whose statistics are not the defaults."""
    torch.manual_seed(3)
    made = build_network("resnet50", 3).train()
    with torch.no_grad():
        made(torch.randn(8, 3, 64, 64))
    return made.eval()
