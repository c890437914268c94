"""Fuzzes ONNX files through what ``tandem models add`` does: the right answer, or a clear error.

The file is read in a worker process, as the command's own process reads it: a library may die of a
file. The first that dies of each signal is added by the command's own function, which must say so.

A worker takes one file after another. It is forked from a process that has imported everything, so
that another is there in milliseconds.
"""

import os
import pickle
import signal
import struct
import subprocess
import sys
import traceback
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from calibration.sets import onnx_graph  # noqa: F401  before the workers are forked
from calibration.sets.add_set import NewSet, add_set_apart
from calibration.sets.ending import is_distribution
from calibration.sets.importing import answers_of, import_member
from calibration.sets.input import Normalisation, trial_images
from calibration.sets.options import FileOptions, MemberOptions
from models.errors import TandemError
from models.image import sides_of
from models.openvino_network import CompiledNetwork, RuntimeOptions
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
    attribute = rng.choice([attribute for node in graph.node for attribute in node.attribute])
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


NUM_IMAGES = 4
LIMIT_S = 60  # of one file, on a machine however busy: a reader that hangs is ended
CLOSE = 0.02  # of probabilities; INT8 rounds
SCALE = (64.0,) * 3
HOW = FileOptions(normalisation=Normalisation((0.0,) * 3, SCALE, "BGR"))
Answer = tuple[str, str]  # what became of a file, and more of it


class OnnxFuzz:
    """Spoils an ONNX file and has it added, for either runtime.

    Args:
        folder: where the file is written.

    """

    def __init__(self, folder: Path) -> None:
        self._content, self._path = whole(), folder / "net.onnx"
        self._labels = folder / "labels.txt"
        self._labels.write_text("\n".join("abc"[:NUM_CLASSES]), "utf-8")
        self._deaths: set[str] = set()  # that the command was tried with
        self._workers: subprocess.Popen[bytes] | None = None

    def __call__(self, rng: Random) -> str:
        self._path.write_bytes(spoilt(rng, self._content))
        runtime = rng.choice(["openvino", "onnxruntime"])
        what, more = self._asked(runtime)
        assert what not in ("traceback", "wrong", "hung"), f"{what}: {more}"
        if what != "died":
            return what
        if more not in self._deaths:
            self._deaths.add(more)
            self._add(runtime)
        return f"died {more}"

    def close(self) -> None:
        if self._workers is not None:
            self._workers.communicate()  # they end with their stdin
            self._workers = None

    def _asked(self, runtime: str) -> Answer:
        if self._workers is None:
            self._workers = subprocess.Popen(
                [sys.executable, "-m", "tests.support.onnx_fuzz"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._workers.stdin is not None
        assert self._workers.stdout is not None
        self._workers.stdin.write(pickle.dumps((self._path, runtime)))
        self._workers.stdin.flush()
        answer: Answer = pickle.load(self._workers.stdout)
        return answer

    def _add(self, runtime: Any) -> None:
        """Let the command's function add the file: it must survive, and may say why it does not."""
        new = NewSet(
            name="made",
            members=[("a", self._path)],
            labels=self._labels,
            options=MemberOptions(color_order="BGR", mean=(0.0,) * 3, scale=SCALE),
            runtimes={"a": runtime},
        )
        message = str(self._path)
        try:
            add_set_apart(new, self._path.parent, is_replaced=True, say=lambda *_: None)
        except TandemError as error:
            message = error.message
        assert _is_clear(message, self._path), message


def _is_clear(message: str, path: Path) -> bool:
    """Whether an error's message names the file, in a line."""
    return str(path) in message and "\n" not in message and len(message) < 2000


def _added(path: Path, runtime: Any) -> Answer:
    """Add a file in this process; what is taken must be what ONNX Runtime makes of the file."""
    try:
        made = import_member(path, runtime, HOW)
    except TandemError as error:
        is_clear = _is_clear(error.message, path)
        return ("model_set", "") if is_clear else ("wrong", f"error: {error.message}")
    except Exception:
        return "traceback", traceback.format_exc()
    images = trial_images(NUM_IMAGES, (*sides_of(made.form.size), 3))
    if isinstance(made.network, bytes):
        rows = answers_of(made, path, images)
    else:
        network = CompiledNetwork(made.network, RuntimeOptions(batch_sizes=(1,)))
        rows = np.concatenate([network.predict(image[None]) for image in images])
    is_row = bool(np.isfinite(rows).all()) and rows.min() >= -1e-3 and rows.max() <= 1 + 1e-2
    if not is_row or (made.task == "classification" and not is_distribution(rows)):
        return "wrong", f"rows {rows}"
    expected = _expected(path, images)
    if expected is None or made.doubt is not None or made.task == "multi_label":
        return "taken", "unknown"
    if np.abs(rows - expected).max() > CLOSE:
        return "wrong", f"{rows} for {expected}"
    return "taken", "right"


def _expected(path: Path, images: np.ndarray) -> np.ndarray | None:
    """Return what ONNX Runtime gives for the file as it is; None: it does not run it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        (taken,) = session.get_inputs()
        planes = images.transpose(0, 3, 1, 2).astype(np.float32) / 64
        if taken.type != "tensor(float)" or tuple(taken.shape[1:]) != planes.shape[1:]:
            return None
        rows = np.concatenate([session.run(None, {taken.name: one[None]})[0] for one in planes])
    except Exception:
        return None
    rows = rows.reshape(len(images), -1)
    if is_distribution(rows):
        return np.asarray(rows)
    exponentials = np.exp(rows - rows.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def _work(answers: int) -> None:
    """Answer what comes on stdin until it ends."""
    while True:
        try:
            path, runtime = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        signal.alarm(LIMIT_S)  # what hangs in a library dies of it
        answer = _added(path, runtime)
        signal.alarm(0)
        os.write(answers, pickle.dumps(answer))


def _death(status: int) -> Answer:
    """Say how a worker ended; ``status`` is of waitpid(2)."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        return "hung", f"over {LIMIT_S} s"
    return "died", signal.Signals(-code).name if code < 0 else f"exit code {code}"


def main() -> None:
    """Fork workers, one after another, until one of them has no more to do."""
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries may print
    while True:
        worker = os.fork()
        if worker == 0:
            _work(answers)
            os._exit(0)
        _, status = os.waitpid(worker, 0)
        if status == 0:
            return
        os.write(answers, pickle.dumps(_death(status)))


if __name__ == "__main__":
    main()
