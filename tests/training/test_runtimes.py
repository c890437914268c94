"""torchvision's networks as members that run on PyTorch: they answer as the modules do."""

from pathlib import Path

import numpy as np
import pytest
import torch

from calibration.sets.networks import build_network
from calibration.sets.runtimes.imported_file import FileOptions
from calibration.sets.runtimes.torch_export import import_module
from calibration.training.augment import normalised
from models.runtimes.load import load
from models.runtimes.options import RuntimeOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 64),
        ("densenet121", 64),
        ("mobilenet_v3_small", 64),
        ("efficientnet_b0", 64),
        ("shufflenet_v2_x0_5", 64),
        ("squeezenet1_1", 64),
        ("convnext_tiny", 64),
        ("swin_t", 64),
        ("vit_b_16", 32),
    ],
)
def test_an_exported_network_answers_as_the_module(tmp_path: Path, name: str, size: int) -> None:
    torch.manual_seed(3)
    module = build_network(name, 10, size).eval()
    made = import_module(module, size, 10, FileOptions(outputs="logits"), Path(name))
    (tmp_path / "net.pt2").write_bytes(made.content)
    network = load(tmp_path / "net.pt2", RuntimeOptions(batch_sizes=(1, 4)))
    pixels = np.random.default_rng(1).integers(0, 256, (3, size, size, 3), np.uint8)  # BGR
    with torch.inference_mode():
        batch = normalised(np.ascontiguousarray(pixels[..., ::-1]))
        expected = module(batch).softmax(1).numpy()
    np.testing.assert_allclose(network.predict(pixels), expected, atol=1e-5)
    np.testing.assert_allclose(network.predict(pixels[:1]), expected[:1], atol=1e-5)
