"""Reads an ONNX file's operators and external files, without the onnx package.

It only walks the structure (field numbers of onnx.proto, ONNX 1.23) and skips weights. It runs
before any library opens the file: external data names paths, which must not be followed from a
model set.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from models.errors import ModelSetError

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
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
Field = tuple[int, int | memoryview]


@dataclass
class OnnxFacts:
    """The facts read from an ONNX file."""

    operators: set[str] = field(default_factory=set)
    external: set[str] = field(default_factory=set)  # paths of external data, as written


def onnx_facts(content: bytes | memoryview, where: str) -> OnnxFacts:
    """Walk the bytes of an ONNX file.

    Raises:
        ModelSetError: they are not an ONNX file, or it was cut short.

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

    Raises:
        ModelSetError: the file is unreadable, too large or not ONNX, or has weights in other files,
            which the manifest's hash would not cover.

    """
    content = _bytes_of(path)
    if external := onnx_facts(content, str(path)).external:
        raise ModelSetError(
            f"{path} has weights in other files ({_some(external)}), which no hash of the manifest "
            "vouches for: tandem models add puts them into one file"
        )
    return content


def _bytes_of(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ModelSetError(f"{path} has {size} bytes; an ONNX file has at most {MAX_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise ModelSetError(f"cannot read {path}: {error.strerror}") from error


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(map(repr, first)) + (", ..." if len(names) > len(first) else "")


def _walk(data: memoryview, kind: str, facts: OnnxFacts, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"graphs are nested more than {MAX_DEPTH} deep")
    inner = MESSAGES[kind]
    for number, value in _fields(data):
        if not isinstance(value, memoryview):
            continue
        if kind == "node" and number == 4:
            facts.operators.add(str(value, "utf-8"))
        elif (part := inner.get(number)) == "entry":
            _add_entry(value, facts)
        elif part is not None:
            _walk(value, part, facts, depth + 1)


def _add_entry(data: memoryview, facts: OnnxFacts) -> None:
    """Add the location of external data, even if ``data_location`` does not use it."""
    values = dict(_fields(data))
    key, value = values.get(1), values.get(2, memoryview(b""))
    if isinstance(key, memoryview) and isinstance(value, memoryview) and bytes(key) == b"location":
        facts.external.add(str(value, "utf-8"))


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
    """Return the number at ``at``, and the position after it."""
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
