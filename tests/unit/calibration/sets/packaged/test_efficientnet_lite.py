"""EfficientNet-Lite built of its weights computes what PyTorch does; refused: what is not whole."""

import numpy as np
import pytest

from calibration.sets.packaged.efficientnet_lite import STAGE_STRIDES, efficientnet_lite
from models.errors import ModelSetError
from models.runtime import compile_with
from tests.support.calibration.lite_weights import WIDTHS, lite_tensors

SIZE = 33  # odd: padding on both sides differs


@pytest.mark.torch
def test_it_computes_what_pytorch_does() -> None:
    import torch
    from torch.nn import functional

    tensors = {name: torch.from_numpy(v) for name, v in lite_tensors(7).items()}

    def layer(
        x: torch.Tensor, name: str, norm: str, stride: int = 1, groups: int = 1
    ) -> torch.Tensor:
        weights, total = tensors[f"{name}.weight"], []
        for length in (x.shape[3], x.shape[2]):  # TensorFlow's SAME: what is odd goes to the end
            side = weights.shape[-1]
            missing = max(0, (-(-length // stride) - 1) * stride + side - length)
            total += [missing // 2, missing - missing // 2]
        y = functional.conv2d(functional.pad(x, total), weights, None, stride, groups=groups)
        mean, variance, weight, bias = (
            tensors[f"{norm}.{p}"] for p in ("running_mean", "running_var", "weight", "bias")
        )
        return functional.batch_norm(y, mean, variance, weight, bias, eps=1e-3)

    images = np.random.default_rng(5).normal(size=(3, 3, SIZE, SIZE)).astype(np.float32)
    x = functional.relu6(layer(torch.from_numpy(images), "_conv_stem", "_bn0", 2))
    stage, before = -1, x.shape[1]
    for place, width in enumerate(WIDTHS):
        name, taken = f"_blocks.{place}", x
        stage += width != before
        stride = STAGE_STRIDES[stage] if width != before else 1
        if place:
            x = functional.relu6(layer(x, f"{name}._expand_conv", f"{name}._bn0"))
        x = functional.relu6(
            layer(x, f"{name}._depthwise_conv", f"{name}._bn1", stride, x.shape[1])
        )
        x = layer(x, f"{name}._project_conv", f"{name}._bn2")
        x = x + taken if width == before else x
        before = width
    x = functional.relu6(layer(x, "_conv_head", "_bn1")).mean((2, 3))
    expected = functional.linear(x, tensors["_fc.weight"], tensors["_fc.bias"]).numpy()

    model = efficientnet_lite(lite_tensors(7), SIZE, "net.pth")
    model.reshape([3, 3, SIZE, SIZE])
    found = compile_with(model, {"INFERENCE_PRECISION_HINT": "f32"})(images)[0]
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("name", ["_blocks.3._bn1.running_var", "_fc.bias", "_conv_stem.weight"])
def test_a_tensor_that_is_missing_is_named(name: str) -> None:
    tensors = lite_tensors(7)
    del tensors[name]
    with pytest.raises(ModelSetError, match=rf"net\.pth has no tensor {name}"):
        efficientnet_lite(tensors, SIZE, "net.pth")


def test_tensors_that_do_not_fit_are_one_line() -> None:
    tensors = lite_tensors(7)
    tensors["_blocks.2._expand_conv.weight"] = np.ones((8, 9, 1, 1), np.float32)
    with pytest.raises(
        ModelSetError, match=r"net\.pth: shapes of EfficientNet-Lite do not"
    ) as raised:
        efficientnet_lite(tensors, SIZE, "net.pth")
    assert "\n" not in raised.value.message
