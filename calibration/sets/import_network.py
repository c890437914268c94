"""Imports a classifier that OpenVINO can read as a member: uint8 BGR in, probabilities out."""

from collections.abc import Sequence
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
from calibration.sets.classes import select_classes
from calibration.sets.ending import (
    check_weights,
    cut_rounding,
    flatten_output,
    own_ending,
    with_ending,
)
from calibration.sets.file_options import FileOptions, Sides, check_ends, layout_and_size
from calibration.sets.files import check_file
from calibration.sets.fold import ColorOrder, fold, fold_integers, order_doubt
from calibration.sets.rewrite import chain_concats
from calibration.sets.symmetric_weights import make_weights_symmetric
from calibration.sets.task import Ending, gives, task_of
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.record import Precision, Task
from models.runtime import CompiledNetwork, RuntimeOptions, check_network, read_network

# ONNX operators of INT8 with ranges computed per batch; OpenVINO's graph has none for them.
DYNAMIC = {"DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "DynamicQuantizeMatMul"}
MAX_LEVELS = 256  # of a quantisation to 8 bits
NUM_ASKED = 8  # images whose answers are compared with those of another runtime


@dataclass(frozen=True)
class Imported:
    """A folded network, and facts about it."""

    network: ov.Model | bytes  # bytes: an ONNX file for ONNX Runtime
    input_size: int
    num_classes: int
    precision: Precision
    fixed_batch: int | None = None  # images at a time; None: any number
    task: Task = "classification"
    facts: str = ""  # its input and output, for people
    doubt: str | None = None  # what may be wrong with how it was read
    answers: Probabilities | None = None  # (NUM_ASKED, C) of OpenVINO to trial images, one by one


@dataclass(frozen=True)
class _Reading:
    """How to read the network of a file."""

    path: Path
    size: int
    layout: TensorLayout
    batch: int | None
    precision: Precision
    task: Task
    pixel_order: ColorOrder
    options: FileOptions


def import_network(path: Path, options: FileOptions, converted: Path | None = None) -> Imported:
    """Read an IR, ONNX or TFLite classifier and fold preprocessing and its ending into it.

    Args:
        path: the file.
        options: for reading it.
        converted: the IR that a file of PyTorch was converted to; ``path`` is what the user gave.

    Raises:
        ModelSetError: not one image in and one row of classes out; the message names the inputs and
            outputs.

    """
    operators = check_file(converted or path)
    model = read_network(converted or path)
    check_ends(path, _names(model.inputs), _names(model.outputs))
    check_weights(model, path)
    layout, size, batch = layout_and_size(
        _sides(model.input().partial_shape),
        f"{path} takes {model.input().element_type} {model.input().partial_shape}",
        options.input_size,
        options.layout,
    )
    is_folded = model.input().element_type == ov.Type.u8 and path.suffix != ".tflite"
    usual: ColorOrder = "BGR" if is_folded else "RGB"
    reading = _Reading(
        path=path,
        size=size,
        layout=layout,
        batch=batch,
        precision="INT8" if _is_quantized(model, operators, path) else "FP16",
        task=task_of(path, options.outputs, options.task, own_ending(model)),
        pixel_order=options.pixel_order or usual,
        options=options,
    )
    if reading.precision == "INT8":
        make_weights_symmetric(model)
    is_float = not model.input().element_type.is_integral()
    doubt = options.normalisation.doubt if is_float else None
    if is_folded:
        name = model.input().any_name if model.input().names else ""
        doubt = order_doubt(name, options.pixel_order)
    model, added, at_a_time = _folded_for_any(model, reading)
    _, num_classes = check_network(model, str(path))
    trial = CompiledNetwork(model, RuntimeOptions(batch_sizes=(1, NUM_TRIED)))
    check_independent(trial, path, reading.precision)
    images = trial_images(NUM_ASKED, trial.input_shape)
    takes = (
        options.normalisation.formula if is_float else f"{reading.pixel_order} pixels as they are"
    )
    return Imported(
        model,
        size,
        num_classes,
        reading.precision,
        at_a_time,
        reading.task,
        f"takes {takes}; {gives(reading.task, added)}",
        doubt,
        np.concatenate([trial.predict(image[None]) for image in images]),
    )


def _sides(shape: ov.PartialShape) -> Sides:
    if shape.rank.is_dynamic:
        return ()
    return tuple(side.get_length() if side.is_static else None for side in shape)


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
        model = fold(model, size, reading.options.normalisation, layout, batch)
    check_network(model, str(path))
    check_rows(model, path)
    model, added = with_ending(model, path, reading.options.outputs, reading.task)
    if (classes := reading.options.classes) is not None:
        model = select_classes(model, classes, path, reading.task)
    return model, added


def _names(ports: Sequence[ov.Output]) -> list[str]:
    return [port.any_name if port.names else "unnamed" for port in ports]


def _is_quantized(model: ov.Model, operators: set[str], path: Path) -> bool:
    """Whether it computes in INT8; ``operators`` are of its ONNX file."""
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
    return bool(levels or DYNAMIC & operators)
