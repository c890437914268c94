"""Folds preprocessing and softmax or sigmoid into a network, which then takes uint8 images.

The input is uint8 (N, H, W, 3) BGR, the output float32 (N, C) in 0..1. Layout, colour order, mean,
scale and softmax are part of the network, so that no caller can get them wrong, and images are a
quarter of the bytes.

TFLite networks, and many others, have a built-in batch size of one: their input is [1, H, W, 3],
and a reshape makes [1, C]. These reshapes are changed to keep the number of images. A network whose
graph does not allow that keeps its batch size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino import opset15
from openvino.preprocess import ColorFormat, PrePostProcessor

from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.golden import NUM_KEPT, relative_differences
from models.image import Size, sides_of, size_text
from models.network import LoadedNetwork
from models.openvino_network import (
    CompiledNetwork,
    RuntimeOptions,
    fixed_batch,
    last_line,
    named_output,
)
from models.record import Precision

# ImageNet's channel means on 0-255 pixels (torchvision's reference training) and deviations.
MEAN_RGB = (123.675, 116.28, 103.53)
SCALE_RGB = (58.395, 57.12, 57.375)
Triple = tuple[float, float, float]
ColorOrder = Literal["RGB", "BGR"]
FOLDED = "image", "tandem/pixels", "before/tandem/pixels"  # inputs of networks folded before
GREY_BGR, GREY_BITS = (7471, 38470, 19595), 16  # ITU-R 601-2 luma, as Pillow rounds it
INT8_ZERO = 128  # of pixels in a network that takes int8: -128 to 127
# Through these operators OpenVINO moves a reversal of colours correctly into the weights of a
# convolution. Through others it does so wrongly: it leaves PRelu's slopes and a padding unchanged.
CARRYING = {"Add", "Subtract", "Multiply", "Divide", "Convert", "Transpose", "FakeQuantize"}
TensorLayout = Literal["NCHW", "NHWC", "NHW"]  # NHW: grey, without a dimension for channels
NUM_TRIED = 4  # images in a trial batch
# The relative difference allowed between a batch and single images: kernels for different sizes
# round differently, so that a quantised network may answer a step of 1/256 more or less.
TOLERANCE, FLOAT_TOLERANCE = 0.1, 0.01


@dataclass(frozen=True)
class Normalisation:
    """The input of a float network: (pixel - mean) / scale per channel, in ``color_order``."""

    mean: Triple = MEAN_RGB
    scale: Triple = SCALE_RGB
    color_order: ColorOrder = "RGB"

    def formula(self, channels: int = 3) -> str:
        """Return the formula as text, for people."""
        name = self.color_order if channels == 3 else "grey"
        return f"({name} - {_numbers(self.mean[:channels])}) / {_numbers(self.scale[:channels])}"

    def check_channels(self, form: "InputForm", path: Path) -> None:
        """Raise :class:`ModelSetError` if a grey network would get the numbers of colours."""
        if form.channels == 1 and len({*self.mean}) * len({*self.scale}) > 1:
            raise ModelSetError(
                f"{path} takes grey pictures of {size_text(form.size)} px, and mean "
                f"{_numbers(self.mean)}, scale {_numbers(self.scale)} are of three colours: say "
                "--mean and --scale with one number each, on pixels from 0 to 255. --mean 0 "
                "--scale 255 is for a network of 0 to 1, --mean 127.5 --scale 127.5 of -1 to 1, "
                "--mean 0 --scale 1 of 0 to 255"
            )

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
    probabilities = ops.softmax(model.output().get_node().input_value(0), axis=1)
    return named_output(model, probabilities, "probabilities")


def with_sigmoid(model: ov.Model) -> ov.Model:
    """Append a sigmoid to a model that ends in logits (N, C)."""
    return named_output(model, ops.sigmoid(model.output().get_node().input_value(0)), "scores")


@dataclass(frozen=True)
class InputForm:
    """The form of a network's input: its layout, its size, and its batch."""

    size: Size
    layout: TensorLayout = "NCHW"
    batch: int | None = None  # images at a time; None: any number
    channels: int = 3  # 1: grey

    @property
    def shape(self) -> list[int]:
        """The shape, -1 for any number of images."""
        number = -1 if self.batch is None else self.batch
        sides, channels = sides_of(self.size), self.channels
        return {
            "NCHW": [number, channels, *sides],
            "NHWC": [number, *sides, channels],
            "NHW": [number, *sides],
        }[self.layout]


def fold(model: ov.Model, form: InputForm, normalisation: Normalisation | None = None) -> ov.Model:
    """Prepend the conversion from uint8 NHWC BGR to the float input that the model takes."""
    how = normalisation or Normalisation()
    is_reversed = how.color_order == "RGB" and form.channels == 3
    is_carried = is_reversed and _ends_in_convolutions(model)
    steps = _steps(model, form)
    chain = steps.input().preprocess().convert_element_type(ov.Type.f32)
    if is_carried:
        chain = chain.convert_color(ColorFormat.RGB)
    chain.mean(list(how.mean[: form.channels])).scale(list(how.scale[: form.channels]))
    return _built(steps, form, is_reversed=is_reversed and not is_carried)


def fold_integers(model: ov.Model, form: InputForm, color_order: ColorOrder) -> ov.Model:
    """Prepend the conversion from uint8 NHWC BGR to the integer pixels that the model takes.

    A model with int8 inputs takes pixel - 128.
    """
    kind, is_colour = model.input().element_type, form.channels == 3
    if is_colour and kind == ov.Type.u8 and (color_order, form.layout) == ("BGR", "NHWC"):
        return model
    steps = _steps(model, form)
    chain = steps.input().preprocess()
    if kind == ov.Type.i8:
        chain.convert_element_type(ov.Type.f32).mean(INT8_ZERO).convert_element_type(ov.Type.i8)
    elif kind != ov.Type.u8:
        chain.convert_element_type(kind)
    return _built(steps, form, is_reversed=is_colour and color_order == "RGB")


def _steps(model: ov.Model, form: InputForm) -> PrePostProcessor:
    steps = PrePostProcessor(model)
    tensor = steps.input().tensor()
    tensor.set_element_type(ov.Type.u8).set_layout(ov.Layout("NHWC"))
    if form.channels == 3:
        tensor.set_color_format(ColorFormat.BGR)
    tensor.set_shape(replace(form, layout="NHWC").shape)
    steps.input().model().set_layout(ov.Layout(form.layout))
    return steps


def _built(steps: PrePostProcessor, form: InputForm, *, is_reversed: bool) -> ov.Model:
    folded = steps.build()
    if is_reversed:
        image = folded.input()
        ports = image.get_target_inputs()
        # A slice from the last to the first: of a Gather OpenVINO makes other weights again.
        other = ops.slice(image, *(np.array([number]) for number in (2, -4, -1, 3)))
        for port in ports:
            port.replace_source_output(other.output(0))
        folded.validate_nodes_and_infer_types()
    if form.channels == 1:
        folded = _with_grey(folded, form)
    folded.input().set_names({"image"})
    return folded


def _with_grey(model: ov.Model, form: InputForm) -> ov.Model:
    """Return a model that takes BGR, of one that takes grey as uint8 [N, H, W, 1].

    In whole numbers, which neither bf16 rounds nor NNCF quantises: the results are Pillow's.
    """
    pixels = ops.parameter(replace(form, layout="NHWC", channels=3).shape, ov.Type.u8)
    whole = ops.multiply(ops.convert(pixels, "i32"), ops.constant(np.array(GREY_BGR, np.int32)))
    total = ops.add(
        ops.reduce_sum(whole, np.array([3]), keep_dims=True), np.int32(2 ** (GREY_BITS - 1))
    )
    # OpenVINO computes a division of whole numbers in floats, and leaves a fraction.
    grey = ops.convert(opset15.bitwise_right_shift(total, np.int32(GREY_BITS)), "u8")
    for port in model.input().get_target_inputs():
        port.replace_source_output(grey.output(0))
    return ov.Model(model.get_results(), [pixels], model.friendly_name)


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


def with_channel(model: ov.Model) -> ov.Model:
    """Return a model that takes [N, H, W, 1], of one that takes [N, H, W]."""
    shape, kind = model.input().partial_shape, model.input().element_type
    pixels = ops.parameter(ov.PartialShape([*shape, ov.Dimension(1)]), kind)
    plain = ops.squeeze(pixels, np.array([3]))
    for port in model.input().get_target_inputs():
        port.replace_source_output(plain.output(0))
    return ov.Model(model.get_results(), [pixels], model.friendly_name)


def set_shape(model: ov.Model, path: Path, form: InputForm) -> None:
    """Let the network take images of this form.

    Raises :class:`ModelSetError` if it cannot take them, or does not answer each of them.
    """
    try:
        model.reshape(form.shape)
        out = model.output().partial_shape
    except RuntimeError as error:
        size = size_text(form.size)
        raise ModelSetError(f"{path} cannot take {size} px: {last_line(error)}") from error
    if out.rank.is_dynamic:
        raise ModelSetError(
            f"{path} answers in a shape that changes with the number of images: export it again "
            "with a squeeze of named dimensions, or none"
        )
    if form.batch is None and len(out) and out[0].is_static:
        raise ModelSetError(
            f"{path} answers {out} whatever the number of images: export it again so that it "
            "answers each"
        )


def check_rows(model: ov.Model, path: Path) -> None:
    """Check that four images get four rows: a flatten to a fixed width makes more of larger images.

    Raises :class:`ModelSetError` if the number of rows differs.
    """
    number = fixed_batch(model) or NUM_TRIED
    count = "four" if number == NUM_TRIED else number
    trial = model.clone()
    try:
        trial.reshape([number, *list(model.input().partial_shape)[1:]])
        out = trial.output().partial_shape
    except RuntimeError as error:
        raise ModelSetError(f"{path} cannot take {count} images: {last_line(error)}") from error
    if not len(out) or out[0] != number:
        raise ModelSetError(
            f"{path} answers {out} to {count} images: give it the size it was made for"
        )


def keep_images(model: ov.Model, number: int) -> None:
    """Change reshapes to ``number`` rows so that they keep the number of rows."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Reshape":
            continue
        pattern = node.input(1).get_source_output().get_node()
        rows = node.input(0).get_partial_shape()
        if pattern.get_type_name() != "Constant" or rows.rank.is_dynamic or not len(rows):
            continue
        sides = pattern.data.ravel().tolist()
        if not sides or sides[0] != number or rows[0] != number:
            continue
        target = np.array([0, *sides[1:]], np.int64)  # 0: as it is
        kept = ops.reshape(node.input_value(0), target, special_zero=True)
        kept.set_friendly_name(node.get_friendly_name())
        for port in node.output(0).get_target_inputs():
            port.replace_source_output(kept.output(0))
    model.validate_nodes_and_infer_types()


def answers_alike(free: ov.Model, fixed: ov.Model) -> bool:
    """Whether a batch of images gets the same answers as its images one by one."""
    one_by_one = CompiledNetwork(fixed, RuntimeOptions())
    number = NUM_TRIED * (one_by_one.fixed_batch or 1)
    batch = CompiledNetwork(free, RuntimeOptions(batch_sizes=(number,)))
    images = trial_images(number, batch.input_shape)
    return rows_alike(one_by_one.predict(images), batch.predict(images))


def rows_alike(
    expected: Probabilities, answered: Probabilities, tolerance: float = TOLERANCE
) -> bool:
    """Whether the likeliest classes of each image, (N, C), have the expected probabilities.

    Differences are relative: with a thousand classes all probabilities are small.
    """
    indices = np.argsort(-expected, axis=1, kind="stable")[:, :NUM_KEPT]
    kept = np.take_along_axis(expected, indices, axis=1)
    off, total = relative_differences(indices, kept, answered)
    return bool((off <= tolerance * total).all())


def check_independent(network: LoadedNetwork, path: Path, precision: Precision) -> None:
    """Compare answers to images alone and in a batch of ``NUM_TRIED``.

    Raises :class:`ModelSetError` if the answer to an image depends on the others of its batch.
    """
    images = trial_images(NUM_TRIED, network.input_shape)
    together = network.predict(images)
    alone = np.concatenate([network.predict(image[None]) for image in images])
    if not rows_alike(alone, together, TOLERANCE if precision == "INT8" else FLOAT_TOLERANCE):
        difference = float(np.abs(together - alone).max())
        raise ModelSetError(
            f"{path}: the answer to an image depends on the other images of its batch (by "
            f"{difference:.3f} in a probability), and therefore on other callers. It is in "
            "training mode, or mixes its images: export it again after eval(), with every operator "
            "along images"
        )


def trial_images(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return fixed images, (number, H, W, 3) uint8: noise, and plain colours.

    Many networks answer all noise alike, by its mean; plain colours get different answers.
    """
    random = np.random.RandomState(0)
    images = random.randint(0, 256, (number, *shape)).astype(np.uint8)
    images[1::2] = random.randint(0, 256, (len(images[1::2]), 1, 1, shape[-1]))
    return images
