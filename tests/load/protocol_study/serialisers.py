"""Formats of a tensor by themselves: what writing and reading one costs, and how long it gets.

One thread, no network: images as uint8 and as float32, at a usual input size. Each format is read
into a NumPy array that a network could take.
"""

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from app.grpc.open_inference_pb2 import ModelInferRequest

Array = npt.NDArray[Any]
SIZE = 224
BATCHES = (1, 16)
DTYPES = ("uint8", "float32")
SECONDS = 0.5  # of each figure, at least three times


@dataclass(frozen=True)
class Format:
    """Writes an array to bytes, and reads it back."""

    name: str
    write: Callable[[Array], bytes]
    read: Callable[[bytes], Array]


def _npy(array: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _from_npy(data: bytes) -> Array:
    loaded: Array = np.load(io.BytesIO(data), allow_pickle=False)
    return loaded


def _protobuf(array: Array) -> bytes:
    message = ModelInferRequest(raw_input_contents=[array.tobytes()])
    message.inputs.add(datatype=str(array.dtype), shape=list(array.shape))
    return message.SerializeToString()


def _from_protobuf(data: bytes) -> Array:
    message = ModelInferRequest.FromString(data)
    given = message.inputs[0]
    return np.frombuffer(message.raw_input_contents[0], given.datatype).reshape(given.shape)


def _typed_protobuf(array: Array) -> bytes:
    """Write a number for each of the tensor's, as the protocol's typed contents have it."""
    message = ModelInferRequest()
    given = message.inputs.add(datatype=str(array.dtype), shape=list(array.shape))
    is_float = array.dtype == np.float32
    values = given.contents.fp32_contents if is_float else given.contents.uint_contents
    values.extend(array.ravel().tolist())
    return message.SerializeToString()


def _from_typed_protobuf(data: bytes) -> Array:
    given = ModelInferRequest.FromString(data).inputs[0]
    is_float = given.datatype == "float32"
    values = given.contents.fp32_contents if is_float else given.contents.uint_contents
    return np.array(values, given.datatype).reshape(given.shape)


def _arrow(array: Array) -> bytes:
    sink = pa.BufferOutputStream()
    pa.ipc.write_tensor(pa.Tensor.from_numpy(array), sink)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _from_arrow(data: bytes) -> Array:
    read: Array = pa.ipc.read_tensor(pa.py_buffer(data)).to_numpy()
    return read


def _msgpack(array: Array) -> bytes:
    fields = {"dtype": str(array.dtype), "shape": array.shape, "data": array.tobytes()}
    packed: bytes = msgpack.packb(fields)
    return packed


def _from_msgpack(data: bytes) -> Array:
    fields = msgpack.unpackb(data)
    return np.frombuffer(fields["data"], fields["dtype"]).reshape(fields["shape"])


def _json(array: Array) -> bytes:
    fields = {"dtype": str(array.dtype), "data": array.tolist()}
    return orjson.dumps(fields)


def _from_json(data: bytes) -> Array:
    fields = orjson.loads(data)
    return np.array(fields["data"], fields["dtype"])


FORMATS = (
    Format("NumPy npy", _npy, _from_npy),
    Format("Protobuf, raw", _protobuf, _from_protobuf),
    Format("Arrow IPC", _arrow, _from_arrow),
    Format("msgpack", _msgpack, _from_msgpack),
    Format("Protobuf, typed", _typed_protobuf, _from_typed_protobuf),
    Format("JSON (orjson)", _json, _from_json),
)


def measure() -> list[dict[str, Any]]:
    """Return a row for each format, dtype and batch."""
    rng = np.random.default_rng(20)
    rows = []
    for batch in BATCHES:
        pixels = rng.integers(0, 256, (batch, SIZE, SIZE, 3), np.uint8)
        for dtype in DTYPES:
            array = pixels if dtype == "uint8" else (pixels / np.float32(255)).astype(np.float32)
            for each in FORMATS:
                rows.append({"format": each.name, "dtype": dtype, "batch": batch})
                rows[-1] |= _row(each, array)
    return rows


def _row(each: Format, array: Array) -> dict[str, float]:
    data = each.write(array)
    if not np.array_equal(each.read(data), array):
        raise SystemExit(f"{each.name} does not give back what it was given")
    return {
        "bytes": len(data),
        "write_ms": _cpu_ms(lambda: each.write(array)),
        "read_ms": _cpu_ms(lambda: each.read(data)),
    }


def _cpu_ms(run: Callable[[], object]) -> float:
    """Return the median CPU-ms of a run."""
    times: list[float] = []
    ends = time.perf_counter() + SECONDS
    while len(times) < 3 or time.perf_counter() < ends:
        before = time.thread_time()
        run()
        times.append(time.thread_time() - before)
    return round(median(times) * 1e3, 4)
