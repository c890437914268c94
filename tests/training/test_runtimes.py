"""torchvision's networks as members that run on PyTorch: they answer as the modules do."""

from pathlib import Path

import numpy as np
import pytest
import torch

from calibration.sets.networks import build_network
from calibration.sets.runtimes.imported_file import FileOptions
from calibration.sets.runtimes.torch_export import import_module
from calibration.sets.runtimes.torch_script import import_script
from calibration.training.augment import normalised
from models.errors import ModelSetError
from models.runtimes.load import load
from models.runtimes.options import RuntimeOptions
from tests.support.script_files import frozen, save_script, scripted, traced

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


@pytest.mark.parametrize("how", ["trace", "script+freeze"])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("alexnet", 64),
        ("densenet121", 64),
        ("googlenet", 64),
        ("inception_v3", 128),
        ("mobilenet_v3_small", 64),
        ("mnasnet0_5", 64),
        ("efficientnet_b0", 64),
        ("regnet_y_400mf", 64),
        ("shufflenet_v2_x0_5", 64),
        ("squeezenet1_1", 64),
        ("vgg11_bn", 32),
        ("convnext_tiny", 64),
        ("maxvit_t", 224),
        ("swin_t", 64),
        ("swin_v2_t", 64),
        ("vit_b_16", 32),
    ],
)
def test_torchscript_answers_as_the_module(tmp_path: Path, name: str, size: int, how: str) -> None:
    check_script(tmp_path, name, size, how)


@pytest.mark.parametrize("how", ["trace", "script", "trace+freeze", "script+freeze"])
def test_torchscript_however_it_was_saved(tmp_path: Path, how: str) -> None:
    check_script(tmp_path, "resnet18", 64, how)


def check_script(folder: Path, name: str, size: int, how: str) -> None:
    """Add a network as TorchScript and compare its answers with the module's."""
    torch.manual_seed(3)
    module = build_network(name, 10, size).eval()
    sides = (2, 3, size, size)
    made = traced(module, sides, is_float=True) if "trace" in how else scripted(module)
    path = save_script(frozen(made) if "freeze" in how else made, folder / "net.pt")
    options = FileOptions(outputs="logits", input_size=size)
    if "script" in how and name in ("googlenet", "inception_v3"):
        with pytest.raises(ModelSetError, match=r"is a NamedTuple, .*\(trace it\)"):
            import_script(path, options)
        return
    made_file = import_script(path, options)
    (folder / "net.torchscript").write_bytes(made_file.content)
    network = load(folder / "net.torchscript", RuntimeOptions(batch_sizes=(1, 4)))
    pixels = np.random.default_rng(1).integers(0, 256, (3, size, size, 3), np.uint8)  # BGR
    with torch.inference_mode():
        batch = normalised(np.ascontiguousarray(pixels[..., ::-1]))
        expected = module(batch).softmax(1).numpy()
    np.testing.assert_allclose(network.predict(pixels), expected, atol=1e-5)
    np.testing.assert_allclose(network.predict(pixels[:1]), expected[:1], atol=1e-5)
