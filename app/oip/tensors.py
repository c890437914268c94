"""Tensors and inference requests of the Open Inference Protocol, independent of the transport.

Contents are either binary (row-major, little-endian; each BYTES element after its length in 4
bytes) or values: JSON lists, or gRPC's typed contents.
"""

import binascii
import math
import re
import reprlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from app.errors import MAX_SHOWN, BadTensorError
from models.image_files import name_beginning

Bytes = npt.NDArray[np.uint8]
INTEGERS = [f"{kind}{bits}" for kind in ("UINT", "INT") for bits in (8, 16, 32, 64)]
DATATYPES = ("BOOL", *INTEGERS, "FP16", "BF16", "FP32", "FP64", "BYTES")
LENGTH = struct.Struct("<I")  # before each BYTES element
BASE64_START = re.compile(r"[A-Za-z0-9+/]{16}")
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**31 - 1
SLICE_BYTES = 2**16
MICROSECONDS = 1e6
# Triton's priorities begin at 1, the most urgent; RFC 9218's urgencies go from 0 to 7.
MAX_URGENCY = 7
MAX_ID = 1024  # characters
MAX_NAMED = 400  # characters of a text that is named
REGION, REGION_SIZE, REGION_OFFSET = (
    f"shared_memory_{part}" for part in ("region", "byte_size", "offset")
)


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """A slice of a registered shared-memory region; ``offset`` counts from the region's start."""

    region: str
    byte_size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input with unparsed contents: ``raw``, ``values``, ``packed`` or in a ``region``."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | memoryview | None = None
    values: Any = ()
    region: RegionSlice | None = None
    is_base64: bool = False  # whether values are base64 texts
    packed: bytes | None = None  # numbers as protobuf packs them

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

    Raises :class:`BadTensorError` if one of them is invalid, or the shape has too many elements.
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
    if tensor.packed is not None:
        return _unpacked(tensor, tensor.packed).reshape(tensor.shape)
    values = _flat(tensor)
    if set(map(type, values)) - {int}:
        raise _not_uint8(tensor)
    try:
        flat = bytes(values)
    except (ValueError, OverflowError) as error:
        raise _not_uint8(tensor) from error
    return np.frombuffer(flat, np.uint8).reshape(tensor.shape)


def _unpacked(tensor: Tensor, packed: bytes) -> Bytes:
    """Return packed UINT8 values: each has one byte, or from 128 a second one that is 1.

    In slices, which stay in the core's cache, and between which other threads run.
    """
    count, place = tensor.num_elements, 0
    miscounted = _miscounted(tensor, f"{len(packed)} bytes of packed values", count)
    if not count <= len(packed) <= 2 * count:
        raise miscounted
    data, values = np.frombuffer(packed, np.uint8), np.empty(count, np.uint8)
    last: Bytes = np.zeros(1, np.uint8)
    for start in range(0, len(packed), SLICE_BYTES):
        part = data[start : start + SLICE_BYTES]
        before = np.concatenate((last, part[:-1]))
        is_second, last = before > 0x7F, part[-1:]
        if (part[is_second] > 1).any():
            raise _not_uint8(tensor)
        whole = np.where(is_second, before & 0x7F | part << 7, part)[part <= 0x7F]
        if place + whole.size > count:
            raise miscounted
        values[place : place + whole.size] = whole
        place += whole.size
    if place != count or last[0] > 0x7F:
        raise miscounted
    return values


def _not_uint8(tensor: Tensor) -> BadTensorError:
    return BadTensorError(f"input {shown(tensor.name)}: UINT8 data are whole numbers from 0 to 255")


def bytes_elements(tensor: Tensor) -> list[bytes]:
    """Return a BYTES tensor's elements; raise :class:`BadTensorError` if they do not fit."""
    values = _flat(tensor) if tensor.raw is None else _split(tensor, memoryview(tensor.raw))
    # JSON's texts are base64 where nothing says so too: mlserver infer drops the parameter.
    if tensor.is_base64 or _are_base64(values):
        return [_decoded(tensor, number, value) for number, value in enumerate(values)]
    if texts := [value for value in values if not isinstance(value, bytes)]:
        wrapping = name_beginning(str(texts[0])[:MAX_NAMED].encode("utf-8", "replace"))
        what = f" ({shown(texts[0])} is {wrapping[0]})" if wrapping else ""
        raise BadTensorError(
            f"input {shown(tensor.name)}: BYTES in JSON are text, which no encoded image is{what}; "
            "send them in base64 and say so (the input's parameter content_type: base64), as a "
            "binary tensor (binary_data_size), or the image alone as the body with the header "
            "Inference-Header-Content-Length: 0"
        )
    return values


def _are_base64(values: list[Any]) -> bool:
    """Whether all are texts whose first characters are base64; text cannot be an image itself."""
    return bool(values) and all(
        isinstance(value, str) and BASE64_START.match(value) for value in values
    )


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


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """A requested output; with ``num_classes`` above 0 as Triton's classification strings."""

    name: str
    is_binary: bool = False
    num_classes: int = 0
    region: RegionSlice | None = None  # the region that it is written to, in place of the answer


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Inputs, requested outputs (none: all outputs) and parameters."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    @property
    def top_k(self) -> int | None:
        """The number of labels per image; None: one label, without a dimension for labels."""
        return whole_number(self.parameters, "top_k")

    @property
    def threshold(self) -> float | None:
        """The lowest score of a label in a multi-label set; None: the set's own."""
        value: float | None = _number(self.parameters, "threshold", int | float, "a number")
        return value

    @property
    def embedding(self) -> str | None:
        """The member whose pooled features are asked for; None: none."""
        name = self.parameters.get("embedding")
        if name is None or isinstance(name, str):
            return name
        raise BadTensorError(f"parameter embedding is {shown(name)}; it is a member's name")

    @property
    def plan(self) -> str | None:
        """The plan, full or fast; None: the service's own."""
        plan = self.parameters.get("plan")
        if plan is None or isinstance(plan, str):
            return plan
        raise BadTensorError(f"parameter plan is {shown(plan)}; it is full or fast")

    @property
    def timeout_s(self) -> float | None:
        """The client's time limit; the parameter is in microseconds, as in Triton."""
        timeout_us = whole_number(self.parameters, "timeout")
        if timeout_us is not None and timeout_us < 0:
            raise BadTensorError(f"timeout is {timeout_us}; give microseconds above 0")
        return timeout_us / MICROSECONDS if timeout_us else None

    @property
    def priority(self) -> str | None:
        """The value of a Priority header (RFC 9218); None if the client gives no priority."""
        priority = whole_number(self.parameters, "priority")
        if priority is not None and priority < 0:
            raise BadTensorError(
                f"priority is {priority}; 1 goes first, 5 and above wait for others"
            )
        return f"u={min(priority - 1, MAX_URGENCY)}" if priority else None

    @property
    def uses_regions(self) -> bool:
        """Whether an input or output is in shared memory."""
        return any(i.region for i in self.inputs) or any(o.region for o in self.outputs)

    @property
    def wants_binary(self) -> bool:
        """Whether outputs are binary by default: Triton's ``binary_data_output``."""
        return truth(self.parameters, "binary_data_output")


def whole_number(parameters: Mapping[str, Any], name: str) -> int | None:
    """Return an integer parameter; None if it is absent."""
    value: int | None = _number(parameters, name, int, "a whole number")
    return value


def _number(parameters: Mapping[str, Any], name: str, kind: Any, what: str) -> Any:
    value = parameters.get(name)
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    raise BadTensorError(f"parameter {name} is {shown(value)}; it is {what}")


def truth(parameters: Mapping[str, Any], name: str) -> bool:
    """Return a boolean parameter; False if it is absent."""
    value = parameters.get(name, False)
    if isinstance(value, bool):
        return value
    raise BadTensorError(f"parameter {name} is {shown(value)}; it is true or false")


def has_base64(parameters: Mapping[str, Any]) -> bool:
    """Whether a BYTES tensor's elements are base64, by MLServer's ``content_type``."""
    return parameters.get("content_type") == "base64"


def requested_output(
    name: object, parameters: Mapping[str, Any], *, is_binary: bool = False
) -> RequestedOutput:
    """Return a requested output; ``is_binary`` is the default if its parameters do not say.

    Raises :class:`BadTensorError` if the name or a parameter has the wrong type.
    """
    if not isinstance(name, str):
        raise BadTensorError(f"an output's name is {shown(name)}; it is a text")
    region = region_slice(f"output {shown(name)}", parameters)
    num_classes = whole_number(parameters, "classification")
    if num_classes is not None and num_classes < 1:
        raise BadTensorError(
            f"output {shown(name)}: classification is {num_classes}; ask for 1 class or more"
        )
    if "binary_data" in parameters:
        is_binary = truth(parameters, "binary_data")
    return RequestedOutput(name, is_binary, num_classes or 0, region)


def checked_id(value: object) -> str:
    """Return the request's id, checked."""
    if not isinstance(value, str) or len(value) > MAX_ID:
        raise BadTensorError(f"id is {shown(value)}; it is a text of up to {MAX_ID} characters")
    return value


def region_slice(where: str, parameters: Mapping[str, Any]) -> RegionSlice | None:
    """Return the region slice that a tensor's parameters name; None if they name none.

    Raises:
        BadTensorError: the parameters are incomplete, or their offset or size is impossible.
    """
    name, size = parameters.get(REGION), whole_number(parameters, REGION_SIZE)
    offset = whole_number(parameters, REGION_OFFSET)
    if name is None and size is None and offset is None:
        return None
    if not isinstance(name, str) or not name:
        raise BadTensorError(
            f"{where}: {REGION} is {shown(name)}; it is a registered region's name"
        )
    if size is None or size < 1 or (offset or 0) < 0:
        raise BadTensorError(
            f"{where}: {REGION_SIZE} is {shown(size)} and {REGION_OFFSET} {shown(offset or 0)}; "
            "give a size from 1, and an offset from 0 or none"
        )
    return RegionSlice(name, size, offset or 0)
