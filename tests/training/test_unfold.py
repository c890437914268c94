"""From a float IR back to torch weights: the same network, ready to be trained on."""

import numpy as np
import openvino as ov
import pytest
import torch

from calibration.ladder.engines import normalised
from calibration.sets.convert import build_network, convert_module, unfold
from models.errors import ModelSetError

SIZE = 64
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def trained(name: str) -> torch.nn.Module:
    """Return a network whose normalisations are far from doing nothing."""
    torch.manual_seed(7)
    network = build_network(name, 3).train()
    with torch.no_grad():
        for _ in range(3):
            network(torch.randn(4, 3, SIZE, SIZE) * 2 + 1)
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.5, 0.5)
    return network.eval()


@pytest.fixture(scope="module")
def batch() -> torch.Tensor:
    pixels = np.random.default_rng(1).integers(0, 256, (8, SIZE, SIZE, 3), np.uint8)
    return torch.from_numpy(normalised(pixels))


def test_the_unfolded_network_answers_as_the_ir(batch, tmp_path):
    original = trained("resnet50")
    ov.save_model(convert_module(original, "resnet50", SIZE), tmp_path / "x.xml")
    again = build_network("resnet50", 3)
    unfold(again, ov.Core().read_model(tmp_path / "x.xml"), batch)
    with torch.no_grad():
        expected = original(batch).softmax(1).numpy()
        restored = again.eval()(batch).softmax(1).numpy()
        in_training = again.train()(batch).softmax(1).numpy()
    np.testing.assert_allclose(restored, expected, atol=0.02)  # the IR holds FP16
    # The statistics it was given are those of these images: training starts where it was.
    np.testing.assert_allclose(in_training, expected, atol=0.05)


def test_a_densenet_is_refused(batch: torch.Tensor) -> None:
    model = convert_module(trained("densenet169"), "densenet169", SIZE)
    with pytest.raises(ModelSetError, match="only networks that normalise after a convolution"):
        unfold(build_network("densenet169", 3), model, batch)
