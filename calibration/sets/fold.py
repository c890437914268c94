"""Folds preprocessing and softmax or sigmoid into a network, which then takes uint8 images.

The input is uint8 (N, H, W, 3) BGR, the output float32 (N, C) in 0..1. Layout, colour order, mean,
scale and softmax are part of the network, so that no caller can get them wrong, and images are a
quarter of the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.preprocess import ColorFormat, PrePostProcessor

# ImageNet's channel means on 0-255 pixels (torchvision's reference training) and deviations.
MEAN_RGB = (123.675, 116.28, 103.53)
SCALE_RGB = (58.395, 57.12, 57.375)
Triple = tuple[float, float, float]
ColorOrder = Literal["RGB", "BGR"]
FOLDED = "image", "tandem/pixels", "before/tandem/pixels"  # inputs of networks folded before
INT8_ZERO = 128  # of pixels in a network that takes int8: -128 to 127
# Through these operators OpenVINO moves a reversal of colours correctly into the weights of a
# convolution. Through others it does so wrongly: it leaves PRelu's slopes and a padding unchanged.
CARRYING = {"Add", "Subtract", "Multiply", "Divide", "Convert", "Transpose", "FakeQuantize"}


@dataclass(frozen=True)
class Normalisation:
    """The input of a float network: (pixel - mean) / scale per channel, in ``color_order``."""

    mean: Triple = MEAN_RGB
    scale: Triple = SCALE_RGB
    color_order: ColorOrder = "RGB"

    @property
    def formula(self) -> str:
        """The formula as text, for people."""
        return f"({self.color_order} - {_numbers(self.mean)}) / {_numbers(self.scale)}"

    @property
    def doubt(self) -> str | None:
        """A warning if these numbers look like those of pixels from 0 to 1, else None."""
        if min(map(abs, self.scale)) >= 1 and not 0 < max(map(abs, self.mean)) <= 1:
            return None
        mean, scale = ([255 * value for value in values] for values in (self.mean, self.scale))
        return (
            f"mean {_numbers(self.mean)} and scale {_numbers(self.scale)} look like those of "
            f"pixels from 0 to 1, but are taken of 0 to 255: --mean {_numbers(mean)} --scale "
            f"{_numbers(scale)} would be the same of these"
        )


def order_doubt(name: str, pixel_order: ColorOrder | None) -> str | None:
    """Return a warning about the assumed colour order of uint8 pixels, unless it was stated."""
    if pixel_order is not None or name in FOLDED:
        return None
    return (
        "its uint8 pixels are taken for BGR, as those of Tandem's own files are: if it was made "
        "for RGB, say --color-order RGB, and else --color-order BGR"
    )


def _numbers(values: Sequence[float]) -> str:
    return ",".join(f"{value:.6g}" for value in values)


def with_softmax(model: ov.Model) -> ov.Model:
    """Append softmax to a model that ends in logits (N, C)."""
    logits = model.output().get_node().input_value(0)
    probabilities = ops.softmax(logits, axis=1)
    probabilities.get_output_tensor(0).set_names({"probabilities"})
    return ov.Model([probabilities.output(0)], model.get_parameters(), model.friendly_name)


def with_sigmoid(model: ov.Model) -> ov.Model:
    """Append a sigmoid to a model that ends in logits (N, C)."""
    scores = ops.sigmoid(model.output().get_node().input_value(0))
    scores.get_output_tensor(0).set_names({"scores"})
    return ov.Model([scores.output(0)], model.get_parameters(), model.friendly_name)


def fold(
    model: ov.Model,
    input_size: int,
    normalisation: Normalisation | None = None,
    layout: Literal["NCHW", "NHWC"] = "NCHW",
    batch: int | None = None,
) -> ov.Model:
    """Prepend the conversion from uint8 NHWC BGR to the float input that the model takes.

    ``batch`` is the number of images that the model takes at a time; None: any number.
    """
    how = normalisation or Normalisation()
    is_reversed = how.color_order == "RGB"
    is_carried = is_reversed and _ends_in_convolutions(model)
    steps = _steps(model, input_size, layout, batch)
    chain = steps.input().preprocess().convert_element_type(ov.Type.f32)
    if is_carried:
        chain = chain.convert_color(ColorFormat.RGB)
    chain.mean(list(how.mean)).scale(list(how.scale))
    return _built(steps, is_reversed=is_reversed and not is_carried)


def fold_integers(
    model: ov.Model,
    input_size: int,
    color_order: ColorOrder,
    layout: Literal["NCHW", "NHWC"],
    batch: int | None = None,
) -> ov.Model:
    """Prepend the conversion from uint8 NHWC BGR to the integer pixels that the model takes.

    A model with int8 inputs takes pixel - 128.
    """
    kind = model.input().element_type
    if kind == ov.Type.u8 and (color_order, layout) == ("BGR", "NHWC"):
        return model
    steps = _steps(model, input_size, layout, batch)
    chain = steps.input().preprocess()
    if kind == ov.Type.i8:
        chain.convert_element_type(ov.Type.f32).mean(INT8_ZERO).convert_element_type(ov.Type.i8)
    elif kind != ov.Type.u8:
        chain.convert_element_type(kind)
    return _built(steps, is_reversed=color_order == "RGB")


def _steps(
    model: ov.Model, input_size: int, layout: Literal["NCHW", "NHWC"], batch: int | None
) -> PrePostProcessor:
    """Return the first steps of the conversion from uint8 NHWC BGR."""
    steps = PrePostProcessor(model)
    tensor = steps.input().tensor()
    tensor.set_element_type(ov.Type.u8).set_layout(ov.Layout("NHWC"))
    number = -1 if batch is None else batch
    tensor.set_color_format(ColorFormat.BGR).set_shape([number, input_size, input_size, 3])
    steps.input().model().set_layout(ov.Layout(layout))
    return steps


def _built(steps: PrePostProcessor, *, is_reversed: bool) -> ov.Model:
    """Prepend the steps, and a reversal of the colour order if ``is_reversed``."""
    folded = steps.build()
    if is_reversed:
        image = folded.input()
        ports = image.get_target_inputs()
        # A slice from the last to the first: of a Gather OpenVINO makes other weights again.
        other = ops.slice(image, *(np.array([number]) for number in (2, -4, -1, 3)))
        for port in ports:
            port.replace_source_output(other.output(0))
        folded.validate_nodes_and_infer_types()
    folded.input().set_names({"image"})
    return folded


def _ends_in_convolutions(model: ov.Model) -> bool:
    """Whether the image only reaches convolutions, and only through arithmetic."""
    ports = list(model.input().get_target_inputs())
    while ports:
        node = ports.pop().get_node()
        if node.get_type_name() in CARRYING:
            ports += node.output(0).get_target_inputs()
        elif node.get_type_name() != "Convolution":
            return False
    return True
