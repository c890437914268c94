"""Tensors of the Open Inference Protocol: datatypes, shapes and contents.

Contents are either binary (row-major, little-endian; each BYTES element after its length in 4
bytes) or values: JSON lists, or gRPC's typed contents.
"""

import binascii
import math
import reprlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from app.errors import MAX_SHOWN, BadTensorError

Bytes = npt.NDArray[np.uint8]
INTEGERS = [f"{kind}{bits}" for kind in ("UINT", "INT") for bits in (8, 16, 32, 64)]
DATATYPES = ("BOOL", *INTEGERS, "FP16", "BF16", "FP32", "FP64", "BYTES")
LENGTH = struct.Struct("<I")  # before each BYTES element
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """A slice of a registered shared-memory region; ``offset`` counts from the region's start."""

    region: str
    byte_size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input with unparsed contents: ``raw``, ``values``, or in a ``region``."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | memoryview | None = None
    values: Any = ()
    region: RegionSlice | None = None
    is_base64: bool = False  # whether values are base64 texts

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def shown(value: object) -> str:
    """Return the beginning of an untrusted value for an error message, whatever its size."""
    if isinstance(value, (str, bytes)):
        return repr(value[:MAX_SHOWN])[: MAX_SHOWN + 2]
    return reprlib.repr(value)[: MAX_SHOWN + 2]


def checked_tensor(
    name: object,
    datatype: object,
    shape: object,
    *,
    raw: bytes | memoryview | None = None,
    values: Any = (),
    region: RegionSlice | None = None,
    is_base64: bool = False,
) -> Tensor:
    """Return a tensor after checking its name, datatype and shape.

    Raises:
        BadTensorError: one of them is invalid, or the shape has too many elements.

    """
    if not isinstance(name, str) or not name:
        raise BadTensorError(f"an input's name is {shown(name)}; it is a text")
    where = f"input {shown(name)}"
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        known = ", ".join(DATATYPES)
        raise BadTensorError(f"{where}: datatype is {shown(datatype)}; there are {known}")
    return Tensor(name, datatype, _checked_shape(where, shape), raw, values, region, is_base64)


def _checked_shape(where: str, shape: object) -> tuple[int, ...]:
    if not isinstance(shape, Sequence) or isinstance(shape, (str, bytes)):
        raise BadTensorError(f"{where}: shape is {shown(shape)}; it is a list of whole numbers")
    if len(shape) > MAX_DIMENSIONS:
        raise BadTensorError(f"{where}: {len(shape)} dimensions, the limit is {MAX_DIMENSIONS}")
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise BadTensorError(
                f"{where}: shape has {shown(size)}; sizes are whole numbers from 0"
            )
    if math.prod(size or 1 for size in shape) > MAX_ELEMENTS:  # NumPy has no larger empty array
        raise BadTensorError(
            f"{where}: its shape has more elements than {MAX_ELEMENTS}; send smaller requests"
        )
    return tuple(shape)


def uint8_array(tensor: Tensor) -> Bytes:
    """Return a UINT8 tensor's contents in its shape; raw contents become a read-only view.

    Raises:
        BadTensorError: their number differs from the shape's, or a value is not in 0..255.

    """
    if tensor.raw is not None:
        if len(tensor.raw) != tensor.num_elements:
            raise _miscounted(tensor, f"{len(tensor.raw)} bytes", tensor.num_elements)
        return np.frombuffer(tensor.raw, np.uint8).reshape(tensor.shape)
    values = _flat(tensor)
    wrong = f"input {shown(tensor.name)}: UINT8 data are whole numbers from 0 to 255"
    if set(map(type, values)) - {int}:
        raise BadTensorError(wrong)
    try:
        flat = bytes(values)
    except (ValueError, OverflowError) as error:
        raise BadTensorError(wrong) from error
    return np.frombuffer(flat, np.uint8).reshape(tensor.shape)


def bytes_elements(tensor: Tensor) -> list[bytes]:
    """Return a BYTES tensor's elements; raise :class:`BadTensorError` if they do not fit."""
    values = _flat(tensor) if tensor.raw is None else _split(tensor, memoryview(tensor.raw))
    if tensor.is_base64:
        return [_decoded(tensor, number, value) for number, value in enumerate(values)]
    if not all(isinstance(value, bytes) for value in values):
        raise BadTensorError(
            f"input {shown(tensor.name)}: BYTES in JSON are text, which no encoded image is; "
            "send them in base64 and say so (the input's parameter content_type: base64), as a "
            "binary tensor (binary_data_size), or the image alone as the body with the header "
            "Inference-Header-Content-Length: 0"
        )
    return values


def _decoded(tensor: Tensor, number: int, value: Any) -> bytes:
    """Decode an element from base64 (RFC 4648, section 4)."""
    try:
        return binascii.a2b_base64(value, strict_mode=True)
    except (ValueError, TypeError) as error:
        raise BadTensorError(
            f"input {shown(tensor.name)}: element {number}, {shown(value)}, is no base64: {error}; "
            "send a text of A-Z a-z 0-9 + / with = at its end, no line breaks, of a data URL what "
            "comes after the comma"
        ) from error


def _split(tensor: Tensor, raw: memoryview) -> list[bytes]:
    count, place, elements = tensor.num_elements, 0, []
    if count * LENGTH.size > len(raw):
        raise _miscounted(tensor, f"{len(raw)} bytes", f"{count * LENGTH.size} or more")
    for number in range(count):
        if place + LENGTH.size > len(raw):
            raise _miscounted(tensor, f"{number} elements", count)
        (length,) = LENGTH.unpack_from(raw, place)
        place += LENGTH.size
        if length > len(raw) - place:
            raise BadTensorError(
                f"input {shown(tensor.name)}: element {number} has {length} bytes by its length, "
                f"and {len(raw) - place} are left; 4 bytes, little-endian, go before each element"
            )
        elements.append(bytes(raw[place : place + length]))
        place += length
    if place != len(raw):
        raise BadTensorError(
            f"input {shown(tensor.name)}: {len(raw) - place} bytes are left over after its "
            f"{count} elements; shape and data must agree"
        )
    return elements


def _flat(tensor: Tensor) -> list[Any]:
    """Return values in row-major order; they may be flat, or nested like the shape."""
    level = tensor.values
    if not isinstance(level, list):
        raise BadTensorError(f"input {shown(tensor.name)}: data is no list")
    if level and isinstance(level[0], list):
        level = [level]
        for size in tensor.shape:
            if not all(isinstance(part, list) for part in level):
                raise _miscounted(tensor, "data nested less deeply", "its dimensions")
            if other := set(map(len, level)) - {size}:
                raise _miscounted(tensor, f"lists of {min(other)}", f"of {size}")
            level = list(chain.from_iterable(level))
    if len(level) != tensor.num_elements:
        raise _miscounted(tensor, f"{len(level)} values", tensor.num_elements)
    return level


def _miscounted(tensor: Tensor, sent: str, expected: object) -> BadTensorError:
    return BadTensorError(
        f"input {shown(tensor.name)} has {sent}, and its shape {list(tensor.shape)} means "
        f"{expected}; shape and data must agree"
    )


def packed_elements(elements: Iterable[bytes]) -> bytes:
    """Encode BYTES elements in their binary form."""
    return b"".join(part for element in elements for part in (LENGTH.pack(len(element)), element))
