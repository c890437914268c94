"""Imports a classifier that OpenVINO can read as a member: uint8 BGR in, probabilities out.

On the way its graph is rewritten so that OpenVINO runs it better. Concatenations are chained, with
the same results. Quantised weights with a zero point become symmetric ones, which INT8 kernels
take.

TFLite's uint8 networks keep a weight as (q - zero point) * scale, q from 0 to 255. oneDNN's INT8
convolutions take int8 weights without a zero point: with one, OpenVINO computes the layer in float
and makes the weights anew for every image. Where all of an output channel's q - zero point lie in
-127 to 127, the new weights are the same numbers. Where not, the channel gets the scale whose
rounding and clipping cost least (decision 0026).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from calibration.sets.ending import (
    Ending,
    check_weights,
    cut_rounding,
    flatten_output,
    give_two_classes,
    gives,
    is_single,
    own_ending,
    task_of,
    with_ending,
)
from calibration.sets.files import check_file
from calibration.sets.input import (
    NUM_TRIED,
    ColorOrder,
    InputForm,
    Normalisation,
    answers_alike,
    check_independent,
    check_rows,
    fold,
    fold_integers,
    keep_images,
    order_doubt,
    set_shape,
    trial_images,
    with_channel,
)
from calibration.sets.input_range import Fitted, fitted, sides_of
from calibration.sets.labels import notes_of, own_labels
from calibration.sets.options import FileOptions, check_ends, input_form, select_classes
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.openvino_network import CompiledNetwork, RuntimeOptions, check_network, read_network
from models.record import Precision, Task

# ONNX operators of INT8 with ranges computed per batch; OpenVINO's graph has none for them.
DYNAMIC = {"DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "DynamicQuantizeMatMul"}
TWO_CLASSES = ", the second label's; the first has the rest"  # behind what a single number is
MAX_LEVELS = 256  # of a quantisation to 8 bits
NUM_ASKED = 8  # images whose answers are compared with those of another runtime
Weights = npt.NDArray[Any]
LARGEST = 127  # of an int8 weight
NUM_SCALES = 32  # scales, from that which clips to that which only rounds
# Dimensions of weights that are not the output channels': (O, I, ...), and (groups, O, I, ...).
CHANNEL_DIMENSIONS = {"Convolution": 1, "GroupConvolution": 2}


@dataclass(frozen=True)
class Imported:
    """A folded network, and facts about it."""

    network: ov.Model | bytes  # bytes: an ONNX file for ONNX Runtime
    form: InputForm
    num_classes: int
    precision: Precision
    fixed_batch: int | None = None  # images at a time; None: any number
    task: Task = "classification"
    facts: str = ""  # its input and output, for people
    doubt: str | None = None  # what may be wrong with how it was read
    answers: Probabilities | None = None  # (NUM_ASKED, C) of OpenVINO to trial images, one by one
    options: FileOptions | None = None  # by which it was read: with what the network wants
    labels: tuple[str, ...] | None = None  # in its metadata
    wanted: tuple[Normalisation, ...] = ()  # see Fitted
    takes_integers: bool = False  # the file's own network, before it was folded


@dataclass(frozen=True)
class _Reading:
    """How to read the network of a file."""

    path: Path
    form: InputForm
    precision: Precision
    task: Task
    pixel_order: ColorOrder
    options: FileOptions


def import_network(path: Path, options: FileOptions, converted: Path | None = None) -> Imported:
    """Read an IR, ONNX or TFLite classifier and fold preprocessing and its ending into it.

    ``converted`` is the IR that a file of PyTorch was converted to; ``path`` is what the user gave.
    Raises :class:`ModelSetError` unless one image goes in and one row of classes comes out; the
    message names the inputs and outputs.
    """
    operators = check_file(converted or path)
    model = read_network(converted or path)
    check_ends(path, _names(model.inputs), _names(model.outputs))
    _check_output_type(model, path)
    check_weights(model, path)
    kind, shape = model.input().element_type, model.input().partial_shape
    facts = f"{path} takes {kind.get_type_name()} {shape}"
    form = input_form(sides_of(model.input()), facts, options.input_size, options.layout)
    fit = fitted(model, form, options, path)
    options = fit.options
    is_folded = kind == ov.Type.u8 and path.suffix != ".tflite"
    usual: ColorOrder = "BGR" if is_folded else "RGB"
    reading = _Reading(
        path=path,
        form=form,
        precision="INT8" if _is_quantized(model, operators, path) else "FP16",
        task=task_of(
            path, options.outputs, options.task, own_ending(model), is_single=is_single(model)
        ),
        pixel_order=options.pixel_order or usual,
        options=options,
    )
    if reading.precision == "INT8":
        make_weights_symmetric(model)
    of_two = TWO_CLASSES if is_single(model) else ""
    takes, doubt = _takes(model, reading, fit, is_folded=is_folded)
    labels = own_labels(notes_of(model), path)
    model, added, at_a_time = _folded_for_any(model, reading)
    _, num_classes = check_network(model, str(path))
    trial = CompiledNetwork(model, RuntimeOptions(batch_sizes=(1, NUM_TRIED)))
    check_independent(trial, path, reading.precision)
    images = trial_images(NUM_ASKED, trial.input_shape)
    return Imported(
        model,
        form,
        num_classes,
        reading.precision,
        at_a_time,
        reading.task,
        f"takes {takes}; {gives(reading.task, added)}{of_two}",
        fit.doubt or doubt,
        np.concatenate([trial.predict(image[None]) for image in images]),
        options,
        labels,
        fit.wanted,
        takes_integers=kind.is_integral(),
    )


def _check_output_type(model: ov.Model, path: Path) -> None:
    kind = model.output().element_type
    if not kind.is_real() and kind not in (ov.Type.u8, ov.Type.i8):
        raise ModelSetError(
            f"{path} gives {kind.get_type_name()} {model.output().partial_shape}; a member gives "
            "floats, or uint8 and int8 of a quantised network: export what comes before these (an "
            "argmax?)"
        )


def _takes(
    model: ov.Model, reading: _Reading, fit: Fitted, *, is_folded: bool
) -> tuple[str, str | None]:
    """Return the pixels that the network takes, for people, and any doubt about them."""
    form, options = reading.form, reading.options
    if not model.input().element_type.is_integral():
        (how := options.normalisation).check_channels(form, reading.path)
        return how.formula(form.channels) + fit.note, how.doubt
    if form.channels == 1:
        return "grey pixels as they are", None
    name = model.input().any_name if model.input().names else ""
    doubt = order_doubt(name, options.pixel_order) if is_folded else None
    return f"{reading.pixel_order} pixels as they are", doubt


def _folded_for_any(
    model: ov.Model, reading: _Reading
) -> tuple[ov.Model, Ending | None, int | None]:
    """Return the member, the added ending, and the batch size (None: any number of images)."""
    if (batch := reading.form.batch) is None:
        return *_folded(model, reading), None
    freed, free = model.clone(), None
    with suppress(ModelSetError, RuntimeError):  # the graph may not allow any number
        keep_images(freed, batch)
        free = _folded(freed, replace(reading, form=replace(reading.form, batch=None)))
    fixed, added = _folded(model, reading)
    if free is not None and answers_alike(free[0], fixed):
        return *free, None
    return fixed, added, batch


def _folded(model: ov.Model, reading: _Reading) -> tuple[ov.Model, Ending | None]:
    path, form = reading.path, reading.form
    if form.layout == "NHW":
        model, form = with_channel(model), replace(form, layout="NHWC")
    set_shape(model, path, form)
    model = cut_rounding(model)
    flatten_output(model, path)
    if is_single(model):
        give_two_classes(model, reading.options.outputs)
    if model.input().element_type.is_integral():
        model = fold_integers(model, form, reading.pixel_order)
    else:
        if reading.precision == "FP16":
            chain_concats(model)
        model = fold(model, form, reading.options.normalisation)
    check_network(model, str(path))
    check_rows(model, path)
    model, added = with_ending(model, path, reading.options.outputs, reading.task)
    if (classes := reading.options.classes) is not None:
        model = select_classes(model, classes, path, reading.task)
    return model, added


def _names(ports: Sequence[ov.Output]) -> list[str]:
    return [port.any_name if port.names else "unnamed" for port in ports]


def _is_quantized(model: ov.Model, operators: set[str], path: Path) -> bool:
    rounding = [node for node in model.get_ops() if node.get_type_name() == "FakeQuantize"]
    if any(node.get_attributes()["levels"] > MAX_LEVELS for node in rounding):
        raise ModelSetError(
            f"{path} is quantised to 16 bits, which OpenVINO computes wrongly: run it on ONNX "
            "Runtime (--runtime NAME=onnxruntime), or add the float network and let tandem "
            "quantize make INT8 of it"
        )
    return bool(rounding or DYNAMIC & operators)


def chain_concats(model: ov.Model) -> int:
    """Turn each concatenation that extends an earlier one into "the earlier one and the new input".

    DenseNet concatenates all features so far before every layer: (a, b), (a, b, c), (a, b, c, d)...
    Quantised, OpenVINO's low-precision passes handle every input of every concatenation on its own,
    which is quadratic in the depth of a block. Chained, the INT8 DenseNet169 takes about a quarter
    of the memory and a third of the load time, and runs faster (decision 0015).

    Changes ``model`` in place and returns how many concatenations were rewritten.
    """
    seen: dict[tuple[int, tuple[tuple[str, int], ...]], ov.Node] = {}  # by axis and inputs
    num_rewritten = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Concat":
            continue
        sources = [port.get_source_output() for port in node.inputs()]
        key = tuple((s.get_node().get_friendly_name(), s.get_index()) for s in sources)
        axis = node.get_attributes()["axis"]
        if (earlier := seen.get((axis, key[:-1]))) is None:
            seen[axis, key] = node
            continue
        chained = ops.concat([earlier.output(0), sources[-1]], axis)
        chained.set_friendly_name(node.get_friendly_name() + "/chained")
        for port in node.output(0).get_target_inputs():
            port.replace_source_output(chained.output(0))
        seen[axis, key] = chained
        num_rewritten += 1
    model.validate_nodes_and_infer_types()
    return num_rewritten


ARITHMETIC: dict[str, Callable[[Weights, Weights], Weights]] = {
    "Subtract": np.subtract,
    "Multiply": np.multiply,
    "Transpose": lambda values, order: values.transpose(order.astype(int)),
    "Reshape": lambda values, shape: values.reshape(_block_sides(values, shape)),
    "Unsqueeze": lambda values, axes: np.expand_dims(values, tuple(axes.ravel().astype(int))),
}


def make_weights_symmetric(model: ov.Model) -> int:
    """Change the weights of ``model`` in place; return of how many layers."""
    num_changed = 0
    for node in model.get_ordered_ops():
        dimensions = CHANNEL_DIMENSIONS.get(node.get_type_name())
        if dimensions is None or not _has_zero_point(node.input_value(1).get_node()):
            continue
        if (weights := _value(node.input_value(1).get_node())) is None:
            continue
        whole, scale = _as_int8(weights, tuple(range(dimensions, weights.ndim)))
        made = ops.multiply(ops.convert(ops.constant(whole), "f32"), ops.constant(scale))
        node.input(1).replace_source_output(made.output(0))
        num_changed += 1
    model.validate_nodes_and_infer_types()
    return num_changed


def _as_int8(weights: Weights, axes: tuple[int, ...]) -> tuple[Weights, Weights]:
    """Return int8 weights, and the float32 scale of each output channel."""
    largest: Weights = np.abs(weights).max(axis=axes, keepdims=True)
    finest = np.full_like(largest, _step(weights))
    coarsest = np.maximum(largest / LARGEST, finest)
    best, least = coarsest, np.full_like(largest, np.inf)
    for share in np.linspace(0, 1, NUM_SCALES, dtype=np.float32):
        scale = finest + share * (coarsest - finest)
        cost = ((_rounded(weights, scale) * scale - weights) ** 2).sum(axis=axes, keepdims=True)
        best, least = np.where(cost < least, scale, best), np.minimum(cost, least)
    return _rounded(weights, best).astype(np.int8), best.astype(np.float32)


def _rounded(weights: Weights, scale: Weights) -> Weights:
    return np.clip(np.rint(weights / scale), -LARGEST, LARGEST)


def _step(weights: Weights) -> float:
    """Return the scale that all weights are multiples of: the least difference of two."""
    values = np.unique(weights)
    if len(values) < 2:
        return max(float(np.abs(values).max()), 1.0) / LARGEST
    steps = np.diff(values)
    return float(steps[steps > 1e-6 * np.abs(values).max()].min())


def _has_zero_point(node: ov.Node) -> bool:
    """Whether weights are uint8 less something, converted to float."""
    while node.get_type_name() in ARITHMETIC:
        inner = node.input_value(0).get_node()
        if node.get_type_name() == "Subtract":
            is_converted = inner.get_type_name() == "Convert"
            return bool(is_converted and inner.input_value(0).get_element_type() == ov.Type.u8)
        node = inner
    return False


def _value(node: ov.Node) -> Weights | None:
    """Compute constants; None if they are not, or of operations that are not known here."""
    kind = node.get_type_name()
    if kind == "Constant":
        return np.array(node.data)
    if kind == "Convert":
        value = _value(node.input_value(0).get_node())
        return None if value is None else value.astype(np.float32)
    if kind not in ARITHMETIC:
        return None
    first, second = (_value(port.get_source_output().get_node()) for port in node.inputs())
    return None if first is None or second is None else ARITHMETIC[kind](first, second)


def _block_sides(values: Weights, shape: Weights) -> list[int]:
    """Return a Reshape's sides: 0 keeps a side (these weights have none of 0)."""
    sides = shape.ravel().astype(int).tolist()
    return [values.shape[place] if side == 0 else side for place, side in enumerate(sides)]
