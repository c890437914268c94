"""Rewrites quantised weights that have a zero point as symmetric ones, which INT8 kernels take.

TFLite's uint8 networks keep a weight as (q - zero point) * scale, q from 0 to 255. oneDNN's INT8
convolutions take int8 weights without a zero point: with one, OpenVINO computes the layer in float
and makes the weights anew for every image. Where all of an output channel's q - zero point lie in
-127 to 127, the new weights are the same numbers. Where not, the channel gets the scale whose
rounding and clipping cost least. Measured: decision 0026.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

Weights = npt.NDArray[Any]
LARGEST = 127  # of an int8 weight
NUM_TRIED = 32  # scales, from that which clips to that which only rounds
# Dimensions of weights that are not the output channels': (O, I, ...), and (groups, O, I, ...).
CHANNEL_DIMENSIONS = {"Convolution": 1, "GroupConvolution": 2}
ARITHMETIC: dict[str, Callable[[Weights, Weights], Weights]] = {
    "Subtract": np.subtract,
    "Multiply": np.multiply,
    "Transpose": lambda values, order: values.transpose(order.astype(int)),
    "Reshape": lambda values, shape: values.reshape(_sides(values, shape)),
    "Unsqueeze": lambda values, axes: np.expand_dims(values, tuple(axes.ravel().astype(int))),
}


def make_weights_symmetric(model: ov.Model) -> int:
    """Change the weights of ``model`` in place; return of how many layers."""
    num_changed = 0
    for node in model.get_ordered_ops():
        dimensions = CHANNEL_DIMENSIONS.get(node.get_type_name())
        if dimensions is None or not _has_zero_point(node.input_value(1).get_node()):
            continue
        weights = _value(node.input_value(1).get_node())
        if weights is None:
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
    for share in np.linspace(0, 1, NUM_TRIED, dtype=np.float32):
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
            return bool(
                inner.get_type_name() == "Convert"
                and inner.input_value(0).get_element_type() == ov.Type.u8
            )
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


def _sides(values: Weights, shape: Weights) -> list[int]:
    """Return a Reshape's sides: 0 keeps a side (these weights have none of 0)."""
    sides = shape.ravel().astype(int).tolist()
    return [values.shape[place] if side == 0 else side for place, side in enumerate(sides)]
