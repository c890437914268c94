"""Imports a classifier that OpenVINO can read as a member: uint8 BGR in, probabilities out."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import openvino as ov

from calibration.sets.batch import (
    NUM_TRIED,
    TensorLayout,
    answers_alike,
    check_independent,
    check_rows,
    keep_images,
    set_shape,
    trial_images,
)
from calibration.sets.classes import ClassMap, select_classes
from calibration.sets.ending import (
    check_weights,
    cut_rounding,
    flatten_output,
    own_ending,
    with_ending,
)
from calibration.sets.files import check_file, is_quantized
from calibration.sets.fold import ColorOrder, Normalisation, fold, fold_integers, order_doubt
from calibration.sets.rewrite import chain_concats
from calibration.sets.symmetric_weights import make_weights_symmetric
from calibration.sets.task import Ending, Outputs, gives, task_of
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.record import Precision, Task
from models.runtime import CompiledNetwork, RuntimeOptions, check_network, fixed_batch, read_network

MAX_LEVELS = 256  # of a quantisation to 8 bits
NUM_ASKED = 8  # images whose answers are compared with those of another runtime


@dataclass(frozen=True)
class Imported:
    """A folded network, and facts about it."""

    model: ov.Model
    input_size: int
    num_classes: int
    precision: Precision
    fixed_batch: int | None = None  # images at a time; None: any number
    task: Task = "classification"
    facts: str = ""  # its input and output, for people
    doubt: str | None = None  # what may be wrong with how it was read
    answers: Probabilities | None = None  # (NUM_ASKED, C) to trial images, asked one by one


@dataclass(frozen=True)
class _Reading:
    """How to read the network of a file."""

    path: Path
    size: int
    layout: TensorLayout
    batch: int | None
    precision: Precision
    normalisation: Normalisation
    pixel_order: ColorOrder
    outputs: Outputs
    task: Task
    classes: ClassMap | None


def import_network(
    path: Path,
    input_size: int | None,
    normalisation: Normalisation,
    outputs: Outputs = "auto",
    *,
    layout: TensorLayout | None = None,
    pixel_order: ColorOrder | None = None,
    classes: ClassMap | None = None,
    task: Task | None = None,
    converted: Path | None = None,
) -> Imported:
    """Read an IR, ONNX or TFLite classifier and fold preprocessing and its ending into it.

    Args:
        path: the file.
        input_size: in pixels, where the network leaves it open.
        normalisation: of a network that takes floats. One that takes integers takes pixels as
            they are, int8 less 128.
        outputs: what it ends in; auto goes by the graph, and by rows of images if that is unclear.
        layout: of its input; None: the dimension that has three sides is the colours'.
        pixel_order: of a network that takes pixels; None: BGR for IR and ONNX that take uint8,
            which are taken as folded already, RGB for all else.
        classes: the network's own, if they are to be mapped to others.
        task: of the set; None: multi-label if it ends in a sigmoid, else classification.
        converted: the IR that a file of PyTorch was converted to; ``path`` is what the user gave.

    Raises:
        ModelSetError: not one image in and one row of classes out; the message names the inputs and
            outputs.

    """
    check_file(converted or path)
    model = read_network(converted or path)
    _check_ends(model, path)
    check_weights(model, path)
    order, size = _layout_and_size(model, path, input_size, layout)
    is_folded = model.input().element_type == ov.Type.u8 and path.suffix != ".tflite"
    usual: ColorOrder = "BGR" if is_folded else "RGB"
    reading = _Reading(
        path=path,
        size=size,
        layout=order,
        batch=fixed_batch(model),
        precision="INT8" if _is_quantized(model, converted or path) else "FP16",
        normalisation=normalisation,
        pixel_order=pixel_order or usual,
        outputs=outputs,
        task=task_of(path, outputs, task, own_ending(model)),
        classes=classes,
    )
    if reading.precision == "INT8":
        make_weights_symmetric(model)
    is_float = not model.input().element_type.is_integral()
    doubt = normalisation.doubt if is_float else None
    if is_folded:
        doubt = order_doubt(model.input().any_name if model.input().names else "", pixel_order)
    model, added, at_a_time = _folded_for_any(model, reading)
    (height, width, _), num_classes = check_network(model, str(path))
    if height != width:
        raise ModelSetError(f"{path} takes {height}x{width}; a member takes a square")
    trial = CompiledNetwork(model, RuntimeOptions(batch_sizes=(1, NUM_TRIED)))
    check_independent(trial, path, reading.precision)
    images = trial_images(NUM_ASKED, trial.input_shape)
    if input_size not in (None, height):
        raise ModelSetError(f"{path} takes {height} px, --input-size says {input_size}")
    takes = normalisation.formula if is_float else f"{reading.pixel_order} pixels as they are"
    return Imported(
        model,
        height,
        num_classes,
        reading.precision,
        at_a_time,
        reading.task,
        f"takes {takes}; {gives(reading.task, added)}",
        doubt,
        np.concatenate([trial.predict(image[None]) for image in images]),
    )


def _folded_for_any(
    model: ov.Model, reading: _Reading
) -> tuple[ov.Model, Ending | None, int | None]:
    """Return the member, the added ending, and the batch size (None: any number of images)."""
    if reading.batch is None:
        return *_folded(model, reading), None
    free = _freed(model.clone(), reading)
    fixed, added = _folded(model, reading)
    if free is not None and answers_alike(free[0], fixed):
        return *free, None
    return fixed, added, reading.batch


def _freed(model: ov.Model, reading: _Reading) -> tuple[ov.Model, Ending | None] | None:
    """Return the member for any number of images, or None if the graph does not allow that."""
    assert reading.batch is not None
    try:
        keep_images(model, reading.batch)
        return _folded(model, replace(reading, batch=None))
    except (ModelSetError, RuntimeError):
        return None


def _folded(model: ov.Model, reading: _Reading) -> tuple[ov.Model, Ending | None]:
    """Return the network as a member, and the added ending."""
    path, size, layout, batch = reading.path, reading.size, reading.layout, reading.batch
    set_shape(model, path, layout, size, batch)
    model = cut_rounding(model)
    flatten_output(model, path)
    if model.input().element_type.is_integral():
        model = fold_integers(model, size, reading.pixel_order, layout, batch)
    else:
        if reading.precision == "FP16":
            chain_concats(model)
        model = fold(model, size, reading.normalisation, layout, batch)
    check_network(model, str(path))
    check_rows(model, path)
    model, added = with_ending(model, path, reading.outputs, reading.task)
    if reading.classes is not None:
        model = select_classes(model, reading.classes, path, reading.task)
    return model, added


def _check_ends(model: ov.Model, path: Path) -> None:
    for what, ports in (("inputs", model.inputs), ("outputs", model.outputs)):
        if len(ports) != 1:
            names = ", ".join(port.any_name if port.names else "unnamed" for port in ports)
            raise ModelSetError(
                f"{path} has {len(ports)} {what} ({names}); a member has one image in and one row "
                "of classes out: export it again with that one alone"
            )


def _is_quantized(model: ov.Model, path: Path) -> bool:
    """Whether it computes in INT8; dynamic quantisation cannot be seen here."""
    levels = [
        node.get_attributes()["levels"]
        for node in model.get_ops()
        if node.get_type_name() == "FakeQuantize"
    ]
    if any(number > MAX_LEVELS for number in levels):
        raise ModelSetError(
            f"{path} is quantised to 16 bits, which OpenVINO computes wrongly: run it on ONNX "
            "Runtime (--runtime NAME=onnxruntime), or add the float network and let tandem "
            "quantize make INT8 of it"
        )
    return bool(levels) or is_quantized(path)


def _layout_and_size(
    model: ov.Model, path: Path, input_size: int | None, layout: TensorLayout | None
) -> tuple[TensorLayout, int]:
    """Return the layout, and the side in pixels: the network's, or ``input_size`` if it is open."""
    shape = model.input().partial_shape
    facts = f"{path} takes {model.input().element_type} {shape}"
    if shape.rank.is_dynamic or len(shape) != 4:
        raise ModelSetError(f"{facts}; a member takes images, [N,3,H,W] or [N,H,W,3]")
    sides = [d.get_length() if d.is_static else None for d in shape]
    if layout == "NCHW" or (layout is None and sides[1] == 3):
        layout, channels, (height, width) = "NCHW", sides[1], sides[2:]
    elif layout == "NHWC" or sides[3] == 3:
        layout, channels, (height, width) = "NHWC", sides[3], sides[1:3]
    else:
        raise ModelSetError(f"{facts}; no side is 3 channels: a member takes colour images")
    if channels not in (3, None):
        raise ModelSetError(f"{facts}; as {layout} that is {channels} channels, a member takes 3")
    if height != width:
        raise ModelSetError(f"{facts}; a member takes squares")
    size = height or input_size
    if size is None:
        raise ModelSetError(f"{facts}: its size is open, so say --input-size (224 for ImageNet)")
    return layout, size
