"""Makes a classifier's output one row of probabilities an image: float (N, C)."""

from pathlib import Path
from typing import Literal

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from calibration.sets.batch import NUM_TRIED, random_images
from calibration.sets.fold import with_softmax
from models.errors import ModelSetError
from models.runtime import CompiledNetwork, RuntimeOptions

Outputs = Literal["auto", "logits", "probabilities"]


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


def probabilities(model: ov.Model, path: Path, outputs: Outputs) -> ov.Model:
    """Append softmax if the network ends in logits; ``auto`` runs it once and looks.

    Raises:
        ModelSetError: its rows are no distribution, or no numbers.

    """
    if outputs == "auto" and _last_kind(model) == "Sigmoid":
        raise ModelSetError(
            f"{path} ends in a sigmoid, a score for each class by itself (multi-label): an "
            "ensemble here averages distributions. If its classes exclude each other, export "
            "what goes into the sigmoid"
        )
    if outputs == "logits" or (outputs == "auto" and not _gives_probabilities(model, path)):
        model = with_softmax(model)
    if not _gives_probabilities(model, path):
        raise ModelSetError(
            f"{path} does not give probabilities: rows must be 0..1 and sum to 1; if it ends in "
            "logits, say --outputs logits"
        )
    return model


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
    while node.get_type_name() in ("Reshape", "Squeeze", "Convert", "FakeQuantize", "Transpose"):
        node = node.input_value(0).get_node()
    return str(node.get_type_name())


def _gives_probabilities(model: ov.Model, path: Path) -> bool:
    try:
        network = CompiledNetwork(model, RuntimeOptions(batch_sizes=(NUM_TRIED,)))
        rows = network.infer(random_images(NUM_TRIED, network.input_shape))
    except RuntimeError as error:
        last_line = str(error).strip().splitlines()[-1]
        raise ModelSetError(f"OpenVINO cannot run {path} on four images: {last_line}") from error
    return bool(rows.min() >= -1e-4 and np.allclose(rows.sum(axis=1), 1, atol=1e-2))
