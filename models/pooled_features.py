"""Finds a network's pooled features: what the layer that scores its classes takes.

The scoring layer is the last one with weights: a fully connected one (MatMul) or a 1 x 1
convolution. Its input is one vector an image, or a map whose mean over rows and columns is one.
Everything the image becomes must pass through that layer: softmax, reshapes, rounding and a choice
of classes may follow it. The graph of an INT8 network is searched alike; the features are then
taken before they are rounded for the scoring layer.

:func:`pooled_features` gives them, :func:`features_network` a network that answers them, and
:func:`with_head` the network with another scoring layer.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from models.errors import ModelSetError
from models.openvino_network import named_output

WEIGHTED = ("MatMul", "Convolution", "GroupConvolution", "ConvolutionBackpropData")
ROUNDING = ("FakeQuantize", "Convert")
SOUGHT = "a fully connected layer (MatMul) or a 1 x 1 Convolution with constant weights"
Weights = npt.NDArray[np.float32]


def pooled_features(model: ov.Model, where: str) -> ov.Output:
    """Return the features of a network's images, float32 (N, F), as an output of its graph.

    ``where`` names the network in errors. Raises :class:`ModelSetError` if no layer scores the
    classes, or its input is no vector and no map.
    """
    layer = _scoring_layer(model)
    if layer is None:
        raise ModelSetError(
            f"{where} has no place to cut: looked for {SOUGHT} that all of the image passes, and "
            "no layer with weights is one. Take a set whose networks end in one"
        )
    if not _is_scoring(layer):
        kernel = list(layer.input(1).get_partial_shape())[2:] if "Conv" in _kind(layer) else []
        shape = f" of {' x '.join(map(str, kernel))}" if kernel else ""
        raise ModelSetError(
            f"{where} has no place to cut: looked for {SOUGHT}, and its last layer with weights, "
            f"{layer.get_friendly_name()}, is a {_kind(layer)}{shape}. Take a set whose networks "
            "end in one"
        )
    source = next(port for port in layer.inputs() if _varies(port)).get_source_output()
    while _kind(source.get_node()) in ROUNDING:
        source = source.get_node().input_value(0)
    return _as_vectors(source, where)


def features_network(model: ov.Model, where: str) -> ov.Model:
    """Return a network from the model's images to its features, float32 (N, F).

    Raises :class:`ModelSetError` as :func:`pooled_features` does.
    """
    features = pooled_features(model, where)
    return ov.Model([features], model.get_parameters(), f"{model.friendly_name}_features")


def with_head(model: ov.Model, weights: Weights, bias: Weights, where: str) -> ov.Model:
    """Return the network with another scoring layer, in float, and a softmax.

    The logits are the features times ``weights``, (F, C), plus ``bias``, (C,). All before the cut
    stays as it is. Raises :class:`ModelSetError` as :func:`pooled_features` does.
    """
    scores = ops.matmul(pooled_features(model, where), weights, False, False, name="head")
    logits = ops.add(scores, bias[None])
    return named_output(model, ops.softmax(logits, axis=1), "probabilities")


def _scoring_layer(model: ov.Model) -> ov.Node | None:
    """Return the last layer with weights that everything passes; None if there is none."""
    for node in _passed_by_all(model):
        if _kind(node) in WEIGHTED and sum(map(_varies, node.inputs())) == 1:
            return node
    return None


def _passed_by_all(model: ov.Model) -> Iterator[ov.Node]:
    """Yield the nodes through which all ways from the image to the first output lead, last first.

    In reverse topological order a node is one of these if no other node waits for its inputs.
    """
    end = model.outputs[0].get_node()
    waiting = {end.get_name()}
    for node in reversed(model.get_ordered_ops()):
        if node.get_name() not in waiting:
            continue
        if len(waiting) == 1:
            yield node
        waiting.remove(node.get_name())
        sources = (port.get_source_output().get_node() for port in node.inputs() if _varies(port))
        waiting.update(source.get_name() for source in sources)


def _varies(port: ov.Input) -> bool:
    """Whether a value depends on the image: it is no constant, nor made of constants."""
    seen, nodes = set[str](), [port.get_source_output().get_node()]
    while nodes:
        node = nodes.pop()
        if _kind(node) == "Parameter":
            return True
        for inner in node.inputs():
            source = inner.get_source_output().get_node()
            if source.get_name() not in seen:
                seen.add(source.get_name())
                nodes.append(source)
    return False


def _is_scoring(layer: ov.Node) -> bool:
    if _kind(layer) == "MatMul":
        return True
    sides = list(layer.input(1).get_partial_shape())[2:]
    return _kind(layer) == "Convolution" and all(side == 1 for side in sides)


def _as_vectors(source: ov.Output, where: str) -> ov.Output:
    """Return (N, F) of (N, F), (N, F, 1, 1), (N, 1, F) or a map (N, F, H, W), whose mean it is."""
    shape = source.get_partial_shape()
    sides = [side.get_length() if side.is_static else 0 for side in list(shape)[1:]]
    if len(sides) == 3 and 0 not in sides and max(sides[1:]) > 1:
        source = ops.reduce_mean(source, np.array([2, 3]), keep_dims=False).output(0)
    elif len(sides) > 1 and 0 not in sides and sum(side > 1 for side in sides) <= 1:
        source = ops.reshape(source, np.array([0, -1]), special_zero=True).output(0)
    elif len(sides) != 1 or 0 in sides:
        raise ModelSetError(
            f"{where} has no place to cut: its scoring layer takes {shape}, and a vector an image "
            "or a map is looked for. Take another set"
        )
    if source.get_element_type() != ov.Type.f32:
        source = ops.convert(source, "f32").output(0)
    return source


def _kind(node: ov.Node) -> str:
    return str(node.get_type_name())
