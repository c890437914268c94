"""Makes a classifier's output one row of its task an image: float (N, C) in 0..1."""

from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from calibration.sets.batch import NUM_TRIED, random_images
from calibration.sets.fold import with_sigmoid, with_softmax
from calibration.sets.task import Outputs, check_numbers, missing_ending
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.record import Task
from models.runtime import CompiledNetwork, RuntimeOptions

# What passes on each class's value by itself, or rounds it.
PASSING = (
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "Identity",
    "Convert",
    "FakeQuantize",
)


def cut_quantized_end(model: ov.Model) -> ov.Model:
    """Leave out the rounding to integers that a quantised network ends in.

    What it rounds, to steps of 1/256 as a rule, is answered as it is.
    """
    if not model.output().element_type.is_integral():
        return model
    end = model.output().get_node().input_value(0)
    for kind in ("Convert", "FakeQuantize"):
        node = end.get_node()
        if node.get_type_name() == kind:
            end = node.input_value(0)
    if end.get_element_type().is_integral():
        return model
    return ov.Model([end], model.get_parameters(), model.friendly_name)


def flatten_output(model: ov.Model, path: Path) -> None:
    """Turn (N, C, 1, 1) and (N, 1, 1, C), as some networks end, into (N, C)."""
    out = model.output().partial_shape
    sides = [d.get_length() if d.is_static else None for d in out][1:]
    if len(sides) > 1 and None not in sides and sum(side != 1 for side in sides) <= 1:
        result = model.output().get_node()
        flat = ops.reshape(result.input_value(0), np.array([0, -1]), special_zero=True)
        result.input(0).replace_source_output(flat.output(0))
        model.validate_nodes_and_infer_types()
    elif len(sides) != 1:
        raise ModelSetError(
            f"{path} gives {out}; a member gives probabilities [?,C], one row an image: networks "
            "for detection, segmentation or features are no classifiers"
        )


def with_ending(model: ov.Model, path: Path, outputs: Outputs, task: Task) -> ov.Model:
    """Append what the network lacks of its task: softmax, a sigmoid or nothing; ``auto`` looks.

    Raises:
        ModelSetError: its rows are none of the task's, or no numbers.

    """
    rows = _answers(model, path)
    has_sigmoid = ends_in_sigmoid(model)
    ending = missing_ending(rows, path, outputs, task, has_sigmoid=has_sigmoid)
    if ending is None:
        return model
    ended = with_softmax(model) if ending == "softmax" else with_sigmoid(model)
    check_numbers(_answers(ended, path), path)
    return ended


def ends_in_sigmoid(model: ov.Model) -> bool:
    """Whether the output is a sigmoid's, reshapes and rounding to integers left out."""
    return _last_kind(model) == "Sigmoid"


def check_weights(model: ov.Model, path: Path) -> None:
    """Raise :class:`ModelSetError` if a weight is not a number."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant" or not node.get_element_type().is_real():
            continue
        if np.isnan(node.get_data(dtype=np.float32)).any():
            raise ModelSetError(
                f"{path}: the weights {node.get_friendly_name()} have NaN; its training failed, or "
                "the file is damaged"
            )


def _last_kind(model: ov.Model) -> str:
    """Return the operation that the output is of, reshapes and the like left out."""
    node = model.output().get_node().input_value(0).get_node()
    while node.get_type_name() in PASSING:
        node = node.input_value(0).get_node()
    return str(node.get_type_name())


def _answers(model: ov.Model, path: Path) -> Probabilities:
    """Return the rows of a few random images."""
    try:
        network = CompiledNetwork(model, RuntimeOptions(batch_sizes=(NUM_TRIED,)))
        return network.infer(random_images(NUM_TRIED, network.input_shape))
    except RuntimeError as error:
        last_line = str(error).strip().splitlines()[-1]
        raise ModelSetError(f"OpenVINO cannot run {path} on four images: {last_line}") from error
