"""Brings a classifier's output into its task's form: a row per image, float (N, C) in 0..1."""

from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from calibration.sets.batch import NUM_TRIED, trial_images
from calibration.sets.fold import with_sigmoid, with_softmax
from calibration.sets.task import Ending, Outputs, check_numbers, missing_ending
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.record import Task
from models.runtime import CompiledNetwork, RuntimeOptions, last_line

# Operators that leave each class's value as it is.
PASSING = ("Reshape", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Convert")
OWN: dict[str, Ending] = {"Softmax": "softmax", "Sigmoid": "sigmoid"}


def cut_rounding(model: ov.Model) -> ov.Model:
    """Remove the rounding at the end of a quantised network.

    It rounds probabilities, usually to steps of 1/256, or converts them to integers. With many
    classes rounded rows do not sum to 1: each small probability becomes 0 or a step.
    """
    end = model.output().get_node().input_value(0)
    exact = _before_rounding(end)
    if exact == end or exact.get_element_type().is_integral():
        return model
    if not end.get_element_type().is_integral() and _ending_of(exact) is None:
        return model
    return ov.Model([exact], model.get_parameters(), model.friendly_name)


def _before_rounding(end: ov.Output) -> ov.Output:
    """Return the output before its rounding, or the output itself if it is not rounded.

    The rounding is a FakeQuantize, or a conversion to integers and possibly back.
    """
    node = end.get_node()
    for kind in ("Multiply", "Subtract"):
        if node.get_type_name() == kind and _is_constant(node.input_value(1).get_node()):
            node = node.input_value(0).get_node()
    exact = None
    while node.get_type_name() in ("Convert", "FakeQuantize"):
        source = node.input_value(0)
        types = node.get_element_type(), source.get_element_type()
        if node.get_type_name() == "FakeQuantize" or any(kind.is_integral() for kind in types):
            exact = source
        node = source.get_node()
    return end if exact is None else exact


def _is_constant(node: ov.Node) -> bool:
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")


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


def with_ending(
    model: ov.Model, path: Path, outputs: Outputs, task: Task
) -> tuple[ov.Model, Ending | None]:
    """Append the ending that the network lacks for its task, and return it: softmax or sigmoid.

    Raises:
        ModelSetError: its rows do not fit the task, or are not numbers.

    """
    rows = _answers(model, path)
    ending = missing_ending(rows, path, outputs, task, own_ending(model))
    if ending is None:
        return model, None
    ended = with_softmax(model) if ending == "softmax" else with_sigmoid(model)
    check_numbers(_answers(ended, path), path)
    return ended, ending


def own_ending(model: ov.Model) -> Ending | None:
    """Return "softmax" or "sigmoid" if the network ends in one, else None.

    Reshapes and rounding may follow it.
    """
    return _ending_of(model.output().get_node().input_value(0))


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


def _ending_of(end: ov.Output) -> Ending | None:
    while True:
        exact = _before_rounding(end)
        node = exact.get_node()
        if exact == end and node.get_type_name() not in PASSING:
            return OWN.get(node.get_type_name())
        end = node.input_value(0) if exact == end else exact


def _answers(model: ov.Model, path: Path) -> Probabilities:
    """Return the rows of a few random images."""
    try:
        network = CompiledNetwork(model, RuntimeOptions(batch_sizes=(NUM_TRIED,)))
        return network.predict(trial_images(NUM_TRIED, network.input_shape))
    except RuntimeError as error:
        raise ModelSetError(
            f"OpenVINO cannot run {path} on four images: {last_line(error)}"
        ) from error
