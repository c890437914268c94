"""Brings a classifier's output into its task's form: a row per image, float (N, C) in 0..1.

It determines the network's task, and the ending it lacks: a softmax, a sigmoid or nothing. A
network that ends in a sigmoid scores each class by itself (multi-label). Any other gives logits or
a distribution: classes that exclude each other, unless ``--task`` says multi-label.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from calibration.sets.input import NUM_TRIED, trial_images, with_sigmoid, with_softmax
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.manifest import MemberRecord
from models.openvino_network import SOUGHT, CompiledNetwork, RuntimeOptions, last_line
from models.record import Task

# Operators that leave each class's value as it is.
PASSING = ("Reshape", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Convert")
# Operators that scale or bound each class's value, by a constant.
SCALING = ("Multiply", "Divide", "Add", "Subtract", "Clamp", "Minimum", "Maximum")
Ending = Literal["softmax", "sigmoid"]
Own = Literal["softmax", "sigmoid", "scores"]  # scores: bounded or scaled ones, which are no logits
OWN: dict[str, Own] = {
    "Softmax": "softmax",
    "Sigmoid": "sigmoid",
    "HardSigmoid": "scores",
    "HSigmoid": "scores",
}
Outputs = Literal["auto", "logits", "probabilities"]
SLACK = 1e-4  # how far a value may be outside of 0..1
SUM_SLACK = 1e-2  # how far a row's sum may be from 1
ROUNDED_SUM_SLACK = 0.5  # likewise, of a softmax whose values are rounded, by its own operator
# What makes rows of logits those of a task.
ENDINGS: Mapping[Task, Ending] = {"classification": "softmax", "multi_label": "sigmoid"}


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
        if node.get_type_name() != kind:
            continue
        number = node.input_value(1).get_node()
        if number.get_type_name() == "Convert":
            number = number.input_value(0).get_node()
        if number.get_type_name() == "Constant":
            node = node.input_value(0).get_node()
    exact = None
    while node.get_type_name() in ("Convert", "FakeQuantize"):
        source = node.input_value(0)
        types = node.get_element_type(), source.get_element_type()
        if node.get_type_name() == "FakeQuantize" or any(kind.is_integral() for kind in types):
            exact = source
        node = source.get_node()
    return end if exact is None else exact


def flatten_output(model: ov.Model, path: Path) -> None:
    """Turn (N, C, 1, 1), (N, 1, 1, C) and (N), as some networks end, into (N, C)."""
    out, number = model.output().partial_shape, model.input().partial_shape[0]
    if out.rank.is_static and len(out) == 1 and (out[0].is_dynamic or out[0] == number):
        _replace_end(model, ops.unsqueeze(_end(model), np.int64(1)))
        out = model.output().partial_shape
    sides = [d.get_length() if d.is_static else None for d in out][1:]
    if len(sides) > 1 and None not in sides and sum(side != 1 for side in sides) <= 1:
        _replace_end(model, ops.reshape(_end(model), np.array([0, -1]), special_zero=True))
    elif len(sides) != 1:
        raise ModelSetError(
            f"{path} gives {out}; a member gives probabilities [?,C], one row an image: networks "
            "for detection, segmentation or features are no classifiers"
        )


def is_single(model: ov.Model) -> bool:
    """Whether the network gives one number an image, (N, 1) or (N): a classifier of two classes."""
    out = model.output().partial_shape
    is_one = out.rank.is_static and all(d.is_static and d.get_length() == 1 for d in list(out)[1:])
    return bool(is_one)


def give_two_classes(model: ov.Model, outputs: Outputs) -> None:
    """Turn one number an image, (N, 1), into rows of two classes: 1 - p and p.

    A logit z becomes 0 and z, whose softmax is that of its sigmoid. Which of both it is, the end of
    the graph or ``outputs`` says.
    """
    end = _end(model)
    is_score = is_probability(outputs, own_ending(model))
    rest = ops.subtract(np.float32(1), end) if is_score else ops.multiply(end, np.float32(0))
    _replace_end(model, ops.concat([rest, end], axis=1))


def is_probability(outputs: Outputs, own: Own | None) -> bool:
    """Whether one number an image is a probability, by ``outputs`` or else its graph's ending."""
    return outputs == "probabilities" or (outputs == "auto" and own is not None)


def _end(model: ov.Model) -> ov.Output:
    return model.output().get_node().input_value(0)


def _replace_end(model: ov.Model, node: ov.Node) -> None:
    model.output().get_node().input(0).replace_source_output(node.output(0))
    model.validate_nodes_and_infer_types()


def with_ending(
    model: ov.Model, path: Path, outputs: Outputs, task: Task
) -> tuple[ov.Model, Ending | None]:
    """Append the ending that the network lacks for its task, and return it: softmax or sigmoid.

    Raises :class:`ModelSetError` if its rows do not fit the task, or are not numbers.
    """
    rows = _answers(model, path)
    if (ending := missing_ending(rows, path, outputs, task, own_ending(model))) is None:
        return model, None
    ended = with_softmax(model) if ending == "softmax" else with_sigmoid(model)
    check_numbers(_answers(ended, path), path)
    return ended, ending


def own_ending(model: ov.Model) -> Own | None:
    """Return "softmax" or "sigmoid" if the network ends in one; "scores" of others; else None.

    Reshapes and rounding may follow it.
    """
    return _ending_of(_end(model))


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


def _ending_of(end: ov.Output) -> Own | None:
    is_scaled = False
    while True:
        exact = _before_rounding(end)
        node, kind = exact.get_node(), exact.get_node().get_type_name()
        if exact != end:
            end = exact
        elif kind in PASSING or (kind in SCALING and (source := _scaled(node)) is not None):
            is_scaled |= kind in SCALING
            end = node.input_value(0) if kind in PASSING else source
        else:
            own = OWN.get(kind)
            return "scores" if own and is_scaled else own


def _scaled(node: ov.Node) -> ov.Output | None:
    """Return what constants scale or bound; None if it is not one value alone."""
    inputs = [port.get_source_output() for port in node.inputs()]
    is_constant = ("Constant", "Convert")
    varying = [port for port in inputs if port.get_node().get_type_name() not in is_constant]
    return varying[0] if len(varying) == 1 else None


def _answers(model: ov.Model, path: Path) -> Probabilities:
    try:
        network = CompiledNetwork(model, RuntimeOptions(batch_sizes=(NUM_TRIED,)))
        return network.predict(trial_images(NUM_TRIED, network.input_shape))
    except RuntimeError as error:
        problem = f"OpenVINO cannot run {path} on four images: {last_line(error)}"
        raise ModelSetError(problem) from error


def task_of(
    path: Path, outputs: Outputs, asked: Task | None, own: Own | None, *, is_single: bool = False
) -> Task:
    """Return a network's task: the one asked for, or by default that of its ending (``own``).

    ``is_single``: it gives one number an image, so it has two classes that exclude each other.

    Raises:
        ModelSetError: classification was asked for, but the network ends in a sigmoid; or it is
            single, and was asked for as multi-label or ends in a softmax.
    """
    if is_single:
        if asked == "multi_label" or own == "softmax":
            why = "a softmax of which is always 1" if own == "softmax" else "which is two classes"
            raise ModelSetError(
                f"{path} gives one number an image, {why}: leave --task out, give two labels, and "
                "end it in a sigmoid or a logit"
            )
        return "classification"
    is_scored = own == "sigmoid" and outputs != "logits"  # or what is in front of it is not meant
    if asked == "classification" and is_scored:
        raise ModelSetError(
            f"{path} ends in a sigmoid, a score for each class by itself: that is --task "
            "multi_label. If its classes exclude each other, export what goes into the sigmoid"
        )
    return asked or ("multi_label" if is_scored else "classification")


def missing_ending(
    rows: Probabilities, path: Path, outputs: Outputs, task: Task, own: Own | None
) -> Ending | None:
    """Return the layer to append to a network that answers ``rows``, float32 (N, C).

    ``own`` is the ending of its graph; the rows decide only if that is unclear. Raises
    :class:`ModelSetError` if the rows are not numbers, or do not fit the task; or, with ``--outputs
    auto``, it is unclear whether they are logits.
    """
    check_numbers(rows, path)
    if outputs == "logits":
        return ENDINGS[task]
    if task == "classification":
        return _missing_softmax(rows, path, outputs, own)
    if own == "sigmoid":
        return None
    if is_distribution(rows):
        raise ModelSetError(
            f"{path} gives probabilities that sum to 1, of classes that exclude each other: no "
            "member of a multi_label set. Export what goes into the softmax, and say --outputs "
            "logits"
        )
    is_score = bool(rows.min() >= -SLACK and rows.max() <= 1 + SLACK)
    if outputs == "probabilities":
        if not is_score:
            raise ModelSetError(
                f"{path} does not give scores: values must be 0..1, and are {_range(rows)}; if it "
                "ends in logits, say --outputs logits"
            )
        return None
    if is_score or own is not None:
        raise ModelSetError(
            f"{path} answers {_range(rows)} to images, and no sigmoid ends it: these may be scores "
            "or logits; say --outputs probabilities, or --outputs logits"
        )
    return "sigmoid"


def check_numbers(rows: Probabilities, path: Path) -> None:
    """Raise :class:`ModelSetError` if a network's answers, (N, C), contain NaN or infinity."""
    if np.isnan(rows).any():
        raise ModelSetError(
            f"{path} does not give probabilities, but answers NaN to an image, and no weight is "
            "NaN: it divides by zero (a pooling window that sees only padding), or was made for "
            "another mean and scale"
        )


def _missing_softmax(
    rows: Probabilities, path: Path, outputs: Outputs, own: Own | None
) -> Ending | None:
    if is_distribution(rows):
        return None
    if own == "softmax":
        if np.allclose(rows.sum(axis=1), 1, atol=ROUNDED_SUM_SLACK):
            return None
        raise ModelSetError(
            f"{path} ends in a softmax, but its rows sum to {_range(rows.sum(axis=1))}: it is over "
            "another dimension than the classes. Export it again with a softmax over dimension 1"
        )
    if outputs == "probabilities":
        raise ModelSetError(
            f"{path} does not give probabilities: rows must be 0..1 and sum to 1; if it ends in "
            "logits, say --outputs logits"
        )
    sums, is_positive = rows.sum(axis=1), rows.min() >= -SLACK
    is_same = np.allclose(rows, rows[0])  # whatever the image: says nothing
    are_shares = is_positive and not is_same and np.allclose(sums, sums[0], rtol=SUM_SLACK)
    is_one = np.allclose(sums, 1)  # 1 - p and p of a p in other units
    if own == "scores" or are_shares or is_one or (is_positive and rows.max() <= 1 + SLACK):
        raise ModelSetError(
            f"{path} answers {_range(rows)} to images, and no softmax ends it: these may be scores "
            "of each class, or shares in other units, rather than logits. Export it with a softmax "
            "at its end; or say --outputs logits, which puts one there, or --task multi_label"
        )
    return "softmax"


def is_distribution(rows: Probabilities) -> bool:
    """Whether each row of (N, C) is 0..1 and sums to one."""
    return bool(rows.min() >= -SLACK and np.allclose(rows.sum(axis=1), 1, atol=SUM_SLACK))


def gives(task: Task, added: Ending | None) -> str:
    """Return a phrase with a network's output and the ending that was added, for people."""
    if added is not None:
        return f"gives logits, to which a {added} was added"
    return "gives scores" if task == "multi_label" else "gives probabilities"


def set_task(of_files: Mapping[str, Task]) -> Task:
    """Return the common task of a set's networks, by member and file.

    Raises :class:`ModelSetError` if they differ.
    """
    tasks = set(of_files.values())
    if len(tasks) == 1:
        return tasks.pop()
    scored = ", ".join(name for name, task in of_files.items() if task == "multi_label")
    others = ", ".join(name for name, task in of_files.items() if task == "classification")
    raise ModelSetError(
        f"these do not make one set: {scored} end in a sigmoid (a score for each class by itself), "
        f"{others} do not. Say which it is: --task multi_label puts a sigmoid behind logits; for "
        "--task classification export what goes into the sigmoids"
    )


def _range(rows: Probabilities) -> str:
    return f"{float(rows.min()):.3g} to {float(rows.max()):.3g}"


def embedding_of(member: MemberRecord) -> str:
    """Say whether a member's answers can have its pooled features."""
    network = next(iter(member.networks.values()))
    if network.features is not None:
        return f"an embedding of {network.features} numbers (embedding={member.name})"
    if network.runtime == "onnxruntime":
        return "no embedding: it runs on ONNX Runtime, and is looked for in OpenVINO's graphs alone"
    return f"no embedding: its graph does not end in {SOUGHT}"
