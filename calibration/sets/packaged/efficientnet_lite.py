"""Builds EfficientNet-Lite as an OpenVINO graph, using only its published weights.

The network is EfficientNet (Tan and Le, 2019) without squeeze-and-excitation, with ReLU6 in place
of Swish. The weights determine widths, depths and kernel sizes. Strides and padding are not stored
in them, but are equal in all five sizes. Batch normalisation is folded into the convolutions.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from calibration.sets.fold import Normalisation
from calibration.sets.packaged.tensors_file import Tensors
from models.errors import ModelSetError
from models.runtime import last_line

NORMALISATION = Normalisation(mean=(127.0, 127.0, 127.0), scale=(128.0, 128.0, 128.0))
STAGE_STRIDES = (1, 2, 2, 2, 1, 2, 1)  # of each stage's first block; other blocks have stride 1
EPSILON = 1e-3  # added to the variance, as TensorFlow's original has it
NUM_CHANNELS = 3
Weights = npt.NDArray[np.float32]


def efficientnet_lite(tensors: Tensors, input_size: int, name: str) -> ov.Model:
    """Return the network: float32 (N, 3, H, W) normalised RGB to logits (N, C).

    Args:
        tensors: of the state dict, with names as ``_blocks.0._depthwise_conv.weight``.
        input_size: in pixels.
        name: for errors.

    Raises:
        ModelSetError: the weights are incomplete, or not of an EfficientNet-Lite.

    """
    try:
        return _built(_Parts(tensors), input_size)
    except KeyError as error:
        raise ModelSetError(
            f"{name} has no tensor {error.args[0]}: these are no weights of EfficientNet-Lite, "
            "which this reader knows; other networks come as ONNX (tandem models add)"
        ) from None
    except (RuntimeError, ValueError, IndexError) as error:  # OpenVINO's and NumPy's, of shapes
        raise ModelSetError(
            f"{name}: shapes of EfficientNet-Lite do not fit: {last_line(error)}"
        ) from error


class _Parts:
    """Convolutions of the network, each with its batch normalisation folded in."""

    def __init__(self, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
        self.tensors = tensors

    def weight(self, name: str) -> Weights:
        """Return a tensor as float32."""
        return self.tensors[name].astype(np.float32)

    def width(self, name: str) -> int:
        """Return the number of output channels of a convolution."""
        return int(self.tensors[f"{name}.weight"].shape[0])

    def has(self, name: str) -> bool:
        """Whether there is a convolution of this name."""
        return f"{name}.weight" in self.tensors

    def convolution(self, x: ov.Output, name: str, norm: str, stride: int = 1) -> ov.Output:
        """Return a convolution with its batch normalisation folded in; depthwise by its name."""
        weights = self.weight(f"{name}.weight")  # (out, in, K, K); depthwise (out, 1, K, K)
        gain = self.weight(f"{norm}.weight") / np.sqrt(
            self.weight(f"{norm}.running_var") + np.float32(EPSILON)
        )
        bias = self.weight(f"{norm}.bias") - self.weight(f"{norm}.running_mean") * gain
        weights = weights * gain[:, None, None, None]
        how = ([stride, stride], [0, 0], [0, 0], [1, 1], "same_upper")
        if name.endswith("_depthwise_conv"):
            y = ops.group_convolution(x, weights[:, None], *how, name=name)
        else:
            y = ops.convolution(x, weights, *how, name=name)
        return ops.add(y, bias[None, :, None, None]).output(0)


def _relu6(x: ov.Output) -> ov.Output:
    return ops.clamp(x, 0.0, 6.0).output(0)


def _built(parts: _Parts, input_size: int) -> ov.Model:
    image = ops.parameter([-1, NUM_CHANNELS, input_size, input_size], ov.Type.f32, name="input")
    x = _relu6(parts.convolution(image.output(0), "_conv_stem", "_bn0", stride=2))
    width, place, stage = parts.width("_conv_stem"), 0, -1
    while parts.has(f"_blocks.{place}._depthwise_conv"):
        before, width = width, parts.width(f"_blocks.{place}._project_conv")
        if width == before:  # within a stage a block adds its input to its output
            x = ops.add(_block(parts, x, f"_blocks.{place}", 1), x).output(0)
        else:
            stage += 1
            x = _block(parts, x, f"_blocks.{place}", STAGE_STRIDES[stage])
        place += 1
    x = _relu6(parts.convolution(x, "_conv_head", "_bn1"))
    pooled = ops.reduce_mean(x, np.array([2, 3]), keep_dims=False)  # (N, 1280)
    scores = ops.matmul(pooled, parts.weight("_fc.weight"), False, True, name="_fc")
    logits = ops.add(scores, parts.weight("_fc.bias")[None]).output(0)
    return ov.Model([logits], [image], "efficientnet_lite")


def _block(parts: _Parts, x: ov.Output, name: str, stride: int) -> ov.Output:
    """Return an inverted bottleneck: expand (except in the first stage), filter, project."""
    norms = [f"{name}._bn0", f"{name}._bn1", f"{name}._bn2"]
    if parts.has(f"{name}._expand_conv"):
        x = _relu6(parts.convolution(x, f"{name}._expand_conv", norms[0]))
    x = _relu6(parts.convolution(x, f"{name}._depthwise_conv", norms[1], stride))
    return parts.convolution(x, f"{name}._project_conv", norms[2])
