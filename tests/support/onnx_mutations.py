"""A small ONNX classifier, and mutations of it: in its bytes, and in what its graph says."""

import struct
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.mutations import spoilt_bytes

SIZE, NUM_CLASSES = 8, 3
MARKERS = [b"\xff" * 9, bytes(9), b"\x7f", b"\x80", b"\xff\xff\xff\xff\x07", struct.pack("<q", -1)]
KINDS = [
    "Add", "AveragePool", "BatchNormalization", "Cast", "Clip", "Concat", "Conv", "Div", "Expand",
    "Flatten", "Gather", "Gemm", "GlobalAveragePool", "Identity", "LRN", "MatMul", "MaxPool", "Mul",
    "Pad", "PRelu", "QuantizeLinear", "ReduceMean", "Relu", "Reshape", "Resize", "Shape", "Sigmoid",
    "Slice", "Softmax", "Split", "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze", "Where",
]  # fmt: skip
NUMBERS = [-(2**63), 2**63 - 1, -1, 0, 1, 2, 3, 7, 8, 2**31, 2**40]


def whole() -> bytes:
    """Return a small classifier of most of what classifiers are made of, as an ONNX file."""
    rng = np.random.RandomState(0)
    weights: dict[str, Any] = {
        "w": rng.randn(4, 3, 3, 3) / 4,
        "b": rng.randn(4),
        "scale": np.ones(4),
        "shift": np.zeros(4),
        "mean": np.zeros(4),
        "variance": np.ones(4),
        "slopes": np.full((4, 1, 1), 0.1),
        "d": rng.randn(NUM_CLASSES, 4),
        "e": np.zeros(NUM_CLASSES),
    }
    tensors = [numpy_helper.from_array(np.float32(v), name) for name, v in weights.items()]
    tensors += [
        numpy_helper.from_array(np.array([0, -1, 4, 4]), "shape"),
        numpy_helper.from_array(np.float32(1 / 32), "step"),
        numpy_helper.from_array(np.uint8(128), "zero"),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["n"]),
        helper.make_node("PRelu", ["n", "slopes"], ["p"]),
        helper.make_node("QuantizeLinear", ["p", "step", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["r"]),
        helper.make_node("Reshape", ["r", "shape"], ["s"]),
        helper.make_node("MaxPool", ["s"], ["m"], kernel_shape=[2, 2], strides=[1, 1]),
        helper.make_node("Concat", ["m", "m"], ["t"], axis=2),
        helper.make_node("GlobalAveragePool", ["t"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "d", "e"], ["l"], transB=1),
        helper.make_node("Softmax", ["l"], ["y"], axis=1),
    ]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, SIZE, SIZE])
    rows = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", NUM_CLASSES])
    graph = helper.make_graph(nodes, "net", [image], [rows], tensors)
    opsets = [helper.make_opsetid("", 17)]
    content: bytes = helper.make_model(
        graph, opset_imports=opsets, ir_version=8
    ).SerializeToString()
    return content


def spoilt(rng: Random, content: bytes) -> bytes:
    if rng.random() < 0.4:
        return spoilt_bytes(rng, content, MARKERS)
    model = onnx.load_from_string(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice([_spoil_node, _spoil_node, _spoil_attribute, _spoil_tensor, _spoil_end])(
            rng, model.graph
        )
    changed: bytes = model.SerializeToString()
    return changed


def _spoil_node(rng: Random, graph: Any) -> None:
    node = rng.choice(graph.node)
    names = [tensor.name for tensor in graph.initializer] + [
        n for o in graph.node for n in o.output
    ]
    what = rng.randrange(7)
    if what == 0:
        node.op_type = rng.choice(KINDS)
    elif what == 1 and node.input:
        del node.input[rng.randrange(len(node.input))]
    elif what == 2 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice([*names, "x", "", "none"])
    elif what == 3:
        node.input.append(rng.choice(names))
    elif what == 4:
        node.output.append(rng.choice([*names, "more"]))
    elif what == 5:
        graph.node.remove(node)
    else:
        nodes = list(graph.node)
        rng.shuffle(nodes)
        del graph.node[:]
        graph.node.extend(nodes)


def _spoil_attribute(rng: Random, graph: Any) -> None:
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    attribute = rng.choice(attributes)
    what = rng.randrange(4)
    if what == 0:
        attribute.i = rng.choice(NUMBERS)
    elif what == 1 and attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(NUMBERS)
    elif what == 2:
        del attribute.ints[rng.randrange(3) :]
    else:
        attribute.type = rng.randrange(15)


def _spoil_tensor(rng: Random, graph: Any) -> None:
    tensor = rng.choice(graph.initializer)
    what = rng.randrange(5)
    if what == 0 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(NUMBERS)
    elif what == 1:
        tensor.data_type = rng.randrange(24)
    elif what == 2:
        tensor.raw_data = spoilt_bytes(rng, tensor.raw_data, MARKERS)
    elif what == 3:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
    else:
        graph.initializer.remove(tensor)


def _spoil_end(rng: Random, graph: Any) -> None:
    kind = rng.choice([graph.input, graph.output])[0].type.tensor_type
    what = rng.randrange(3)
    if what == 0:
        kind.elem_type = rng.randrange(24)
    elif what == 1 and kind.shape.dim:
        rng.choice(kind.shape.dim).dim_value = rng.choice(NUMBERS)
    else:
        kind.shape.dim.add().dim_value = rng.choice(NUMBERS)
