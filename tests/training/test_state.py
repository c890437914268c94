"""``models add`` of safetensors: torchvision's architectures, converted."""

import numpy as np
import pytest
import torch

from calibration.sets.add_set import NewSet, add_set
from calibration.sets.convert import build_network, save_tensors
from calibration.sets.options import MemberOptions
from models.errors import ModelSetError
from models.network import RuntimeOptions, load
from tests.support.cases import cases
from tests.support.runtime_files import torch_rows

SIZE = 64
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def added(tmp_path, architecture, runtime):
    (tmp_path / "labels.txt").write_text("a\nb\nc\n", "utf-8")
    new = NewSet(
        "made",
        [("one", tmp_path / "net.safetensors")],
        tmp_path / "labels.txt",
        options=MemberOptions(input_size=SIZE),
        runtimes={"one": runtime} if runtime else {},
        architectures={"one": architecture} if architecture else {},
    )
    return add_set(new, tmp_path / "sets", is_replaced=True)


def test_weights_of_a_known_architecture(tmp_path):
    torch.manual_seed(4)
    module = build_network("resnet18", 3).eval()
    save_tensors(module.state_dict(), tmp_path / "net.safetensors")
    pixels = np.random.default_rng(1).integers(0, 256, (2, SIZE, SIZE, 3), np.uint8)
    network = load(added(tmp_path, "resnet18", None).network_path("one", "FP16"), RuntimeOptions())
    np.testing.assert_allclose(network.predict(pixels), torch_rows(module, pixels), atol=5e-3)


@cases(
    "architecture, runtime, says",
    (None, None, "is weights alone: say whose, --architecture NAME=resnet50"),
    ("resnet81", None, "unknown network 'resnet81'; torchvision has"),
    ("squeezenet1_1", None, "does not fit this network|are no weights of squeezenet1_1"),
    ("resnet18", "onnxruntime", "openvino takes it, not onnxruntime"),
)
def test_weights_of_something_else(tmp_path, architecture, runtime, says):
    save_tensors({"x": torch.zeros(3)}, tmp_path / "net.safetensors")
    with pytest.raises(ModelSetError, match=says):
        added(tmp_path, architecture, runtime)
    assert not (tmp_path / "sets").exists()


def test_a_file_that_is_no_safetensors(tmp_path):
    (tmp_path / "net.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelSetError, match="are no weights of resnet18"):
        added(tmp_path, "resnet18", None)
