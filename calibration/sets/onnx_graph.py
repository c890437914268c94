"""Folds preprocessing and softmax or sigmoid into an ONNX graph, for a member on ONNX Runtime.

Nodes before the network convert uint8 (N, H, W, 3) BGR to its input. Nodes after it select the
set's classes and apply the softmax or sigmoid. All weights go into a single file.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from calibration.sets.ending import Own, gives
from calibration.sets.files import check_file
from calibration.sets.import_network import TWO_CLASSES, Imported
from calibration.sets.importing import Finish, tried
from calibration.sets.input import GREY_BGR, GREY_BITS, ColorOrder, InputForm, order_doubt
from calibration.sets.labels import own_labels
from calibration.sets.options import FileOptions, Sides, check_ends, input_form, num_classes_of
from models.errors import ModelSetError
from models.image import sides_of
from models.record import Precision

OLDEST_OPSET = 7  # of Sub and Div with broadcasting
QUANTIZED = {
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul"),
    *("QLinearConv", "QLinearMatMul", "QGemm", "ConvInteger", "MatMulInteger"),
}
ROUNDING = ("DequantizeLinear", "QuantizeLinear")
PASSING = ("Flatten", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Cast")
SCALING = ("Mul", "Div", "Add", "Sub", "Clip", "Min", "Max")  # by a constant
OWN: dict[str, Own] = {
    "HardSigmoid": "scores",
    "Softmax": "softmax",
    "QLinearSoftmax": "softmax",
    "Sigmoid": "sigmoid",
    "QLinearSigmoid": "sigmoid",
}
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)  # of inputs and outputs
# Other input types: integers with pixel values.
INTEGERS = {
    *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    *(TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
}
LEAST = 1e-12  # bounds a probability before its logarithm
OURS = "tandem/"  # prefix of our names of nodes and tensors
BEFORE = "before/"  # added to such names in a file that was folded before
Graph = Any  # onnx.GraphProto; the package's types are generated


def import_onnx(path: Path, options: FileOptions, converted: Path | None = None) -> Imported:
    """Read an ONNX classifier as a member's file for ONNX Runtime.

    ``converted`` is the result of converting ``path`` from PyTorch; None: ``path`` is ONNX. Raises
    :class:`ModelSetError` if the graph does not map one image input to one row of classes, has
    weights that are missing or outside of its folder, or needs operators that this ONNX Runtime
    lacks.
    """
    check_file(converted or path)
    model = _read(converted or path, path)
    graph = model.graph
    inputs, outputs = _ends(graph, path)
    sides, taken = _sides(inputs), inputs.type.tensor_type.elem_type
    facts = f"{path} takes {TensorProto.DataType.Name(taken).lower()} {_shape_text(sides)}"
    form = input_form(sides, facts, options.input_size, options.layout)
    if taken not in (*FLOATS, *INTEGERS):
        raise ModelSetError(
            f"{facts}; a member takes float32, float16 or integers: export it again so"
        )
    if taken in FLOATS:
        options.normalisation.check_channels(form, path)
    sides, elem_type = _sides(outputs), outputs.type.tensor_type.elem_type
    facts = f"{path} gives {TensorProto.DataType.Name(elem_type).lower()} {_shape_text(sides)}"
    num_classes = num_classes_of(sides, facts)
    exact, own = _exact_end(graph, outputs.name)
    if elem_type not in FLOATS and exact == outputs.name:
        raise ModelSetError(
            f"{facts}; a member gives float32 or float16: export what comes before these"
        )
    make = partial(_folded, model, options, form, max(2, num_classes), exact)
    made = tried(make, path, options, own, is_single=num_classes == 1)
    notes = {note.key: note.value for note in model.metadata_props}
    return replace(made, labels=own_labels(notes, path))


def _read(file: Path, path: Path) -> Any:
    try:
        model = onnx.load(file)
    except Exception as error:  # protobuf's and onnx's own kinds
        problem = str(error).strip().partition("\n")[0]
        raise ModelSetError(f"{path} is no ONNX file: {problem}") from error
    opset = max((o.version for o in model.opset_import if o.domain == ""), default=0)
    if opset < OLDEST_OPSET:
        raise ModelSetError(
            f"{path} is of opset {opset}; {OLDEST_OPSET} or later is taken: convert it with "
            "onnx.version_converter, or export it again"
        )
    _rename_ours(model.graph)
    for tensor in model.graph.initializer:
        if tensor.data_type not in FLOATS:
            continue
        weights = f"{path}: the weights {tensor.name}"
        try:
            values = numpy_helper.to_array(tensor)
        except Exception as error:  # NumPy's and onnx's own kinds
            raise ModelSetError(f"{weights} are damaged: {error}") from error
        if np.isnan(values).any():
            raise ModelSetError(f"{weights} have NaN; its training failed, or the file is damaged")
    return model


def _rename_ours(graph: Graph) -> None:
    """Rename nodes and tensors with our names, in a member's file that is imported again."""

    def other(name: str) -> str:
        return BEFORE + name if OURS in name else name

    for node in graph.node:
        node.input[:] = [other(name) for name in node.input]
        node.output[:] = [other(name) for name in node.output]
    for named in (*graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
        named.name = other(named.name)


def _ends(graph: Graph, path: Path) -> tuple[Any, Any]:
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    check_ends(path, [port.name for port in inputs], [port.name for port in graph.output])
    return inputs[0], graph.output[0]


def _sides(port: Any) -> Sides:
    # Some exporters write an open side as 0 or -1.
    return tuple(d.dim_value if d.dim_value > 0 else None for d in port.type.tensor_type.shape.dim)


def _shape_text(sides: Sides) -> str:
    return "[" + ",".join("?" if side is None else str(side) for side in sides) + "]"


def _exact_end(graph: Graph, output: str) -> tuple[str, Own | None]:
    """Return the tensor to use as output, and what computes it, without reshapes.

    Rounded probabilities of many classes need not sum to one. So after a softmax or sigmoid it is
    the tensor before rounding.
    """
    by_output = {name: node for node in graph.node for name in node.output}

    def before(name: str, kinds: tuple[str, ...]) -> str:
        while (node := by_output.get(name)) is not None and node.op_type in kinds:
            name = node.input[0]
        return name

    exact = before(output, ROUNDING)
    last = by_output.get(before(exact, (*PASSING, *ROUNDING)))
    if last is not None and last.op_type in ("Softmax", "Sigmoid"):
        return exact, OWN[last.op_type]
    constants = {tensor.name for tensor in graph.initializer} | {
        name for name, node in by_output.items() if node.op_type == "Constant"
    }
    is_scaled = False
    while last is not None and last.op_type in SCALING:
        varying = [name for name in last.input if name and name not in constants]
        if len(varying) != 1:
            break
        is_scaled, last = True, by_output.get(before(varying[0], (*PASSING, *ROUNDING)))
    own = None if last is None else OWN.get(last.op_type)
    return output, "scores" if own and is_scaled else own


def _folded(
    original: Any, options: FileOptions, form: InputForm, num_classes: int, end: str, finish: Finish
) -> Imported:
    model = onnx.ModelProto()
    model.CopyFrom(original)
    graph = model.graph
    inputs, _ = _ends(graph, Path())
    is_quantized = any(node.op_type in QUANTIZED for node in graph.node)
    precision: Precision = "INT8" if is_quantized else "FP16"
    number = "N" if form.batch is None else form.batch
    taken = inputs.type.tensor_type.elem_type
    front = _front(graph, inputs.name, taken, options, form)
    nodes = [*front, *graph.node, *_back(graph, end, finish)]
    shape = [number, *sides_of(form.size), 3]
    pixels = helper.make_tensor_value_info(f"{OURS}pixels", TensorProto.UINT8, shape)
    ports = [pixels, *(value for value in graph.input if value.name != inputs.name)]
    num = num_classes if finish.classes is None else len(finish.classes.wanted)
    rows = helper.make_tensor_value_info(f"{OURS}rows", TensorProto.FLOAT, [number, num])
    del graph.node[:], graph.output[:], graph.input[:]
    graph.node.extend(nodes)
    graph.input.extend(ports)
    graph.output.append(rows)
    try:
        content = bytes(model.SerializeToString())
    except Exception as error:  # protobuf's own kind: 2 GiB are its limit
        raise ModelSetError(f"the network is too large for one ONNX file: {error}") from error
    takes, doubt = f"{_order(taken, options)} pixels as they are", None
    if taken in FLOATS:
        takes, doubt = options.normalisation.formula(form.channels), options.normalisation.doubt
    elif form.channels == 1:
        takes = "grey pixels as they are"
    elif taken == TensorProto.UINT8:
        doubt = order_doubt(inputs.name, options.pixel_order)
    return Imported(
        content,
        form,
        num,
        precision,
        form.batch,
        finish.task,
        f"takes {takes}; {gives(finish.task, finish.ending)}{TWO_CLASSES * bool(finish.single)}",
        doubt,
    )


def _order(taken: int, options: FileOptions) -> ColorOrder:
    """Return the network's colour order; a uint8 input means that folding was done before."""
    if taken in FLOATS:
        return options.normalisation.color_order
    return options.pixel_order or ("BGR" if taken == TensorProto.UINT8 else "RGB")


def _front(
    graph: Graph, place: str, taken: int, options: FileOptions, form: InputForm
) -> list[Any]:
    """Return the nodes from uint8 NHWC BGR to the network's input ``place`` of type ``taken``."""
    how, nodes, last = options.normalisation, list[Any](), f"{OURS}pixels"

    def add(kind: str, name: str, *more: str, **attributes: Any) -> None:
        nonlocal last
        made = f"{OURS}{name}"
        nodes.append(helper.make_node(kind, [last, *more], [made], name=made, **attributes))
        last = made

    if form.channels == 1:  # floats hold these whole numbers exactly
        add("Cast", "colours", to=TensorProto.FLOAT)
        weights = np.array(GREY_BGR, np.float32)[:, None] / 2**GREY_BITS
        add("MatMul", "luma", _constant(graph, "weights", weights))
        add("Add", "half", _constant(graph, "rounded", np.array(0.5, np.float32)))
        add("Floor", "grey")
    elif _order(taken, options) == "RGB":
        add("Gather", "rgb", _constant(graph, "reversed", np.array([2, 1, 0], np.int64)), axis=3)
    if taken in FLOATS:
        add("Cast", "floats", to=TensorProto.FLOAT)
        mean, scale = (np.array(n[: form.channels], np.float32) for n in (how.mean, how.scale))
        add("Sub", "centred", _constant(graph, "mean", mean))
        add("Div", "scaled", _constant(graph, "scale", scale))
    if taken != TensorProto.FLOAT and (taken != TensorProto.UINT8 or form.channels == 1):
        add("Cast", "own", to=taken)
    if form.layout == "NCHW":
        add("Transpose", "planes", perm=[0, 3, 1, 2])
    if form.layout == "NHW":
        add("Reshape", "rows_columns", _constant(graph, "sides", np.array(form.shape, np.int64)))
    nodes.append(helper.make_node("Identity", [last], [place], name=f"{OURS}input"))
    return nodes


def _back(graph: Graph, output: str, finish: Finish) -> list[Any]:
    """Return the nodes from the network's own output to float (N, C) rows of its task."""
    nodes = [
        helper.make_node("Cast", [output], [f"{OURS}exact"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", [f"{OURS}exact"], [f"{OURS}flat"], axis=1),
    ]
    last, ending = f"{OURS}flat", finish.ending
    if finish.single is not None:  # 1 - p and p; or 0 and z
        is_score = finish.single == "score"
        number = _constant(graph, "one", np.array([is_score], np.float32))
        kind = "Sub" if is_score else "Mul"
        nodes.append(helper.make_node(kind, [number, last], [f"{OURS}rest"]))
        nodes.append(helper.make_node("Concat", [f"{OURS}rest", last], [f"{OURS}two"], axis=1))
        last = f"{OURS}two"
    if finish.classes is not None:
        places = _constant(graph, "places", np.array(finish.classes.positions, np.int64))
        nodes.append(helper.make_node("Gather", [last, places], [f"{OURS}picked"], axis=1))
        last = f"{OURS}picked"
    if finish.shares_one:  # probabilities of some classes: softmax(log p) is p / sum(p)
        least = _constant(graph, "least", np.array([LEAST], np.float32))
        nodes.append(helper.make_node("Max", [last, least], [f"{OURS}positive"]))
        nodes.append(helper.make_node("Log", [f"{OURS}positive"], [f"{OURS}logits"]))
        last, ending = f"{OURS}logits", "softmax"
    kind = {"softmax": "Softmax", "sigmoid": "Sigmoid", None: "Identity"}[ending]
    attributes = {"axis": 1} if ending == "softmax" else {}
    nodes.append(helper.make_node(kind, [last], [f"{OURS}rows"], **attributes))
    return nodes


def _constant(graph: Graph, name: str, values: np.ndarray) -> str:
    graph.initializer.append(numpy_helper.from_array(values, f"{OURS}{name}"))
    return f"{OURS}{name}"
