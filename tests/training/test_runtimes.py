"""torchvision's networks in PyTorch's files, converted: they answer as the modules do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from calibration.sets.convert import build_network
from calibration.sets.importing import import_member
from calibration.sets.input import Normalisation
from calibration.sets.options import FileOptions
from models.openvino_network import CompiledNetwork, RuntimeOptions
from tests.support.cases import cases
from tests.support.runtime_files import export_module, torch_rows
from tests.support.script_files import frozen, save_script, scripted, traced

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def check(path: Path, module: torch.nn.Module, size: int) -> None:
    """Add a network's file, and compare its answers with the module's."""
    options = FileOptions(outputs="logits", input_size=size)
    made = import_member(path, "openvino", options, is_trusted=True)
    network = CompiledNetwork(made.network, RuntimeOptions(batch_sizes=(1, 4)))
    pixels = np.random.default_rng(1).integers(0, 256, (3, size, size, 3), np.uint8)  # BGR
    expected = torch_rows(module, pixels)
    np.testing.assert_allclose(network.predict(pixels), expected, atol=1e-4)
    np.testing.assert_allclose(network.predict(pixels[:1]), expected[:1], atol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["resnet18", "densenet121", "mobilenet_v3_small", "efficientnet_b0", "shufflenet_v2_x0_5",
     "squeezenet1_1", "convnext_tiny", "swin_t", "vit_b_16"],
)  # fmt: skip
def test_an_exported_network_answers_as_the_module(tmp_path: Path, name: str) -> None:
    torch.manual_seed(3)
    size = 32 if name == "vit_b_16" else 64
    module = build_network(name, 10, size).eval()
    export_module(module, tmp_path / "net.pt2", torch.zeros(2, 3, size, size))
    check(tmp_path / "net.pt2", module, size)


# Each in one of two ways, by turns; the next test has all four.
# Each in one of two ways, by turns; resnet18 in all four.
@cases(
    "name, size, how",
    ("alexnet", 64, "script+freeze"),
    ("densenet121", 64, "trace"),
    ("mobilenet_v3_small", 64, "script+freeze"),
    ("mnasnet0_5", 64, "trace"),
    ("efficientnet_b0", 64, "script+freeze"),
    ("regnet_y_400mf", 64, "trace"),
    ("shufflenet_v2_x0_5", 64, "script+freeze"),
    ("squeezenet1_1", 64, "trace"),
    ("vgg11_bn", 32, "script+freeze"),
    ("convnext_tiny", 64, "trace"),
    ("maxvit_t", 224, "script+freeze"),
    ("swin_t", 64, "trace"),
    ("swin_v2_t", 64, "script+freeze"),
    ("vit_b_16", 32, "trace"),
    *(("resnet18", 64, how) for how in ("trace", "script", "trace+freeze", "script+freeze")),
)
def test_torchscript_answers_as_the_module(tmp_path: Path, name: str, size: int, how: str) -> None:
    torch.manual_seed(3)
    module = build_network(name, 10, size).eval()
    made = traced(module, (2, 3, size, size), is_float=True) if "trace" in how else scripted(module)
    path = save_script(frozen(made) if "freeze" in how else made, tmp_path / "net.pt")
    check(path, module, size)


class Grey(torch.nn.Module):
    """A network of grey pictures, [N, 1, H, W] or [N, H, W], to five logits."""

    def __init__(self, has_channel: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.has_channel = has_channel
        self.maps, self.head = torch.nn.Conv2d(1, 8, 3), torch.nn.Linear(8, 5)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        planes = pixels if self.has_channel else pixels.unsqueeze(1)
        rows: torch.Tensor = self.head(torch.relu(self.maps(planes)).mean((2, 3)))
        return rows


@pytest.mark.parametrize("how", ["program", "trace", "script"])
@pytest.mark.parametrize("has_channel", [True, False])
def test_a_network_of_grey_pictures_answers_as_the_module(tmp_path, how, has_channel):
    """A scripted file says nothing of its input: colour is tried first, then grey."""
    module, size = Grey(has_channel).eval(), (24, 40)
    sides = (2, 1, *size) if has_channel else (2, *size)
    if how == "program":
        path = tmp_path / "net.pt2"
        export_module(module, path, torch.zeros(sides))
    else:
        made = traced(module, sides, is_float=True) if how == "trace" else scripted(module)
        path = save_script(made, tmp_path / "net.pt")
    whole = Normalisation((0.0,) * 3, (255.0,) * 3)
    options = FileOptions(
        outputs="logits", input_size=size if how == "script" else None, normalisation=whole
    )
    made = import_member(path, "openvino", options, is_trusted=True)
    assert made.form.channels == 1
    pixels = np.random.default_rng(1).integers(0, 256, (3, *size, 3), np.uint8)  # BGR
    luma = [np.asarray(Image.fromarray(rgb).convert("L")) for rgb in pixels[..., ::-1]]
    grey = torch.from_numpy(np.stack(luma)).float() / 255
    with torch.inference_mode():
        expected = module(grey[:, None] if has_channel else grey).softmax(1).numpy()
    network = CompiledNetwork(made.network, RuntimeOptions(batch_sizes=(1, 4)))
    np.testing.assert_allclose(network.predict(pixels), expected, atol=1e-4)
