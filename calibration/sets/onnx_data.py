"""Checks where an ONNX file keeps its weights: beside it, in its own folder, or refused.

An ONNX file may name other files for its weights (``TensorProto.external_data``), by any path. A
network that somebody sends must not read files of other folders. Only lengths are read here, no
weights; field numbers are those of onnx.proto.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

from models.errors import ModelSetError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types of protobuf
# Messages that lead to tensors, and the fields by which they do.
MODEL, GRAPH, NODE, ATTRIBUTE, SPARSE, TENSOR, FUNCTION = range(7)
INSIDE = {
    MODEL: {7: GRAPH, 25: FUNCTION},
    FUNCTION: {7: NODE, 11: ATTRIBUTE},
    GRAPH: {1: NODE, 5: TENSOR, 15: SPARSE},
    NODE: {5: ATTRIBUTE},
    ATTRIBUTE: {5: TENSOR, 6: GRAPH, 10: TENSOR, 11: GRAPH, 22: SPARSE, 23: SPARSE},
    SPARSE: {1: TENSOR, 2: TENSOR},
}
EXTERNAL_DATA = 13  # of TensorProto: StringStringEntryProto
MAX_DEPTH = 64


def check_external_data(path: Path) -> None:
    """Check that what an ONNX file keeps elsewhere is in its folder.

    Raises:
        ModelSetError: it is outside, or missing.

    """
    folder = path.parent.resolve()
    for location in sorted(external_locations(path)):
        found = path.parent / location
        if not found.resolve().is_relative_to(folder):
            raise ModelSetError(
                f"{path} keeps weights outside of its folder ({location}): export it again with "
                "its weights inside, or beside it"
            )
        if not found.is_file():
            raise ModelSetError(
                f"{path} keeps weights in {location}, which is missing: put it beside the file"
            )


def external_locations(path: Path) -> set[str]:
    """Return the files that an ONNX file names; none if it is no ONNX."""
    try:
        with (
            path.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            return set(_locations(data, 0, len(data), MODEL, 0))
    except (OSError, ValueError, IndexError):  # OpenVINO says what is wrong with it
        return set()


def _locations(data: memoryview, start: int, end: int, kind: int, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    for number, first, last in _messages(data, start, end):
        if kind == TENSOR:
            if number == EXTERNAL_DATA:
                yield from _location(data, first, last)
        elif (inner := INSIDE[kind].get(number)) is not None:
            yield from _locations(data, first, last, inner, depth + 1)


def _location(data: memoryview, start: int, end: int) -> Iterator[str]:
    fields = {number: bytes(data[a:b]) for number, a, b in _messages(data, start, end)}
    if fields.get(1) == b"location":
        yield fields.get(2, b"").decode("utf-8", "replace")


def _messages(data: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (field number, start, end) of each field that has a length."""
    place = start
    while place < end:
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == BYTES:
            length, place = _varint(data, place)
            if place + length > end:
                raise ValueError("a field runs over the end")
            yield number, place, place + length
            place += length
        elif wire == VARINT:
            _, place = _varint(data, place)
        elif wire in (FIXED64, FIXED32):
            place += 8 if wire == FIXED64 else 4
        else:
            raise ValueError("this is no protobuf")


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")
