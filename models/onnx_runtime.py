"""Networks on ONNX Runtime (the extra ``onnxruntime``), and a reader of ONNX files.

A member's file is an ONNX graph with its preprocessing folded in: uint8 (N, H, W, 3) BGR to float32
(N, C) probabilities. Batches of any size run without compiling. A file with a fixed batch size also
takes any number of images, and runs them in parts of that size.

The reader lists a file's operators and external files without the onnx package. It walks the
structure (field numbers of onnx.proto, ONNX 1.23), skips weights, and runs before any library opens
the file: external data names paths, which must not be followed from a model set.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from models.ensemble import Probabilities
from models.errors import ModelSetError, reading
from models.machine import needs_extra
from models.network import LoadedNetwork, Outputs, Pixels, RuntimeOptions, check_image
from models.openvino_network import SOUGHT
from models.record import RuntimeName

MAX_BYTES = 2**31  # protobuf's own limit of a message
MAX_DEPTH = 32  # of graphs in attributes of nodes of graphs
# For each message, its fields that are relevant messages, by number.
MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
QUIET = 4  # the log level "fatal": errors are raised, and need not be on stderr too
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
Field = tuple[int, int | memoryview]


@dataclass
class OnnxFacts:
    """The facts read from an ONNX file."""

    operators: set[str] = field(default_factory=set)
    external: set[str] = field(default_factory=set)  # paths of external data, as written


def onnx_facts(content: bytes | memoryview, where: str) -> OnnxFacts:
    """Walk the bytes of an ONNX file.

    Raises :class:`ModelSetError` if they are not an ONNX file, or it was cut short.
    """
    facts = OnnxFacts()
    try:
        _walk(memoryview(content), "model", facts, 0)
    except (IndexError, ValueError) as error:
        raise ModelSetError(f"{where} is no ONNX file, or was cut short: {error}") from error
    if not facts.operators:
        raise ModelSetError(f"{where} is no ONNX file: it has no operators")
    return facts


def read_onnx(path: Path) -> bytes:
    """Return the file's bytes after checking that it contains all its weights.

    Raises :class:`ModelSetError` if the file is unreadable, too large or not ONNX, or has weights
    in other files, which the manifest's hash would not cover.
    """
    with reading(path):
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ModelSetError(f"{path} has {size} bytes; an ONNX file has at most {MAX_BYTES}")
        content = path.read_bytes()
    if external := onnx_facts(content, str(path)).external:
        first = ", ".join(map(repr, sorted(external)[:3])) + (", ..." if len(external) > 3 else "")
        raise ModelSetError(
            f"{path} has weights in other files ({first}), which no hash of the manifest "
            "vouches for: tandem models add puts them into one file"
        )
    return content


def _walk(data: memoryview, kind: str, facts: OnnxFacts, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"graphs are nested more than {MAX_DEPTH} deep")
    inner = MESSAGES[kind]
    for number, value in _fields(data):
        if not isinstance(value, memoryview):
            continue
        if kind == "node" and number == 4:
            facts.operators.add(str(value, "utf-8"))
        elif (part := inner.get(number)) == "entry":  # even if data_location does not use it
            entry = dict(_fields(value))
            place = entry.get(2, memoryview(b""))
            if entry.get(1) == memoryview(b"location") and isinstance(place, memoryview):
                facts.external.add(str(place, "utf-8"))
        elif part is not None:
            _walk(value, part, facts, depth + 1)


def _fields(data: memoryview) -> Iterator[Field]:
    """Yield (number, value) of each field of a message: numbers as int, others as bytes."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == BYTES:
            size, at = _varint(data, at)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > end:
            raise ValueError(f"a field of {size} bytes where {end - at} are left")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number of more than ten bytes at {at}")


class OnnxNetwork(LoadedNetwork):
    """A session, which any number of threads may run."""

    runtime: ClassVar[RuntimeName] = "onnxruntime"
    float_type = "f32"
    memory_bytes = 0  # set by load
    kernels: tuple[str, ...] = ()  # ONNX Runtime hides them

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Load an ONNX file.

        Raises:
            MissingExtraError: onnxruntime is not installed.
            ModelSetError: the graph does not fit, has weights in other files, or needs operators or
                an opset that this onnxruntime lacks.
        """
        self.path, self.num_threads = path, options.num_threads
        with needs_extra("onnxruntime", f"{path.name}: a member that runs on ONNX Runtime"):
            import onnxruntime
        self.version = str(onnxruntime.__version__)
        content = read_onnx(path)
        try:
            self._session: Any = onnxruntime.InferenceSession(
                content, _session_options(onnxruntime, options), ["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's errors have no common base
            raise ModelSetError(
                f"ONNX Runtime {self.version} cannot load {path}: {_first_line(error)}"
            ) from error
        self.input_shape, self.num_classes, self.fixed_batch = self._ends()
        sizes = {self.fixed_batch} if self.fixed_batch else set(options.batch_sizes)
        self._sizes = tuple(sorted(sizes))

    no_features = (
        f"it runs on ONNX Runtime, and {SOUGHT} is looked for in OpenVINO's graphs alone: add the "
        "member again without --runtime"
    )

    def _ends(self) -> tuple[tuple[int, ...], int, int | None]:
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1:
            raise ModelSetError(
                f"{self.path} has {len(inputs)} inputs and {len(outputs)} outputs; "
                "a member has one of each"
            )
        (taken,), (output,) = inputs, outputs
        sides = tuple(taken.shape)
        is_fixed = len(sides) == 4 and all(isinstance(side, int) for side in sides[1:])
        if taken.type != "tensor(uint8)" or not is_fixed or sides[3] != 3:
            raise ModelSetError(
                f"{self.path} takes {taken.type} {list(sides)}; a member takes uint8 [N,H,W,3] "
                "with H and W fixed: tandem models add folds the preprocessing in"
            )
        classes = output.shape[1] if len(output.shape) == 2 else None
        if output.type != "tensor(float)" or not isinstance(classes, int):
            raise ModelSetError(
                f"{self.path} gives {output.type} {output.shape}; a member gives float32 [N,C]"
            )
        self._names = [output.name], taken.name
        batch = sides[0] if isinstance(sides[0], int) else None
        return sides[1:], classes, batch

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return self._sizes

    def add_batch_size(self, size: int) -> None:
        if self.fixed_batch is None:
            self._sizes = tuple(sorted({*self._sizes, size}))

    def remove_batch_size(self, size: int) -> None:
        self._sizes = tuple(of for of in self._sizes if of != size)

    def _run(self, images: Pixels | Sequence[Pixels]) -> Outputs:
        for image in images:
            check_image(image, self.input_shape)
        batch = np.ascontiguousarray(images)  # (N, H, W, 3)
        if (num_absent := (self.fixed_batch or 0) - len(batch)) > 0:
            batch = np.concatenate([batch, np.zeros((num_absent, *self.input_shape), np.uint8)])
        outputs, name = self._names
        try:
            rows: Probabilities = self._session.run(outputs, {name: batch})[0]
        except Exception as error:  # as when loading
            problem = f"ONNX Runtime cannot run {self.path} on {len(batch)} images"
            raise ModelSetError(f"{problem}: {_first_line(error)}") from error
        if rows.shape != (len(batch), self.num_classes):
            raise ModelSetError(f"{self.path} answers {rows.shape} to {len(batch)} images")
        return np.asarray(rows, np.float32)[: len(images)], None


def _session_options(onnxruntime: Any, options: RuntimeOptions) -> Any:
    """Return ONNX Runtime's options: a fixed number of threads, which do not spin.

    The calling thread takes part in its run. So with S streams of T threads the shared pool has S *
    (T - 1) threads, and ``intra_op_num_threads`` is that plus one caller. Spinning threads would
    take cores from the other members.
    """
    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = options.num_streams * (options.threads_each - 1) + 1
    chosen.inter_op_num_threads = 1
    chosen.log_severity_level = QUIET
    chosen.add_session_config_entry("session.intra_op.allow_spinning", "0")
    chosen.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return chosen


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
