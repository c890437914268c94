"""Arguments of an exported graph's operators, as torch.export writes them in JSON.

Each is an object of one key, which is its kind (torch._export.serde.schema.Argument). Numbers, data
types and the names of earlier values are read; all else is :data:`UNKNOWN`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# torch._export.serde.schema: ScalarType, Layout, MemoryFormat.
DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}
LAYOUTS = {7: torch.strided}
MEMORY_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    4: torch.preserve_format,
}
# The only arguments that may be text; a file name is none of them.
TEXT_ARGUMENTS = ("approximate", "rounding_mode", "mode", "padding_mode", "equation", "reduce")
PLAIN = ("as_int", "as_bool", "as_ints", "as_bools")
SIZES = ("as_sym_int", "as_sym_float", "as_sym_bool")


@dataclass(frozen=True)
class Ref:
    """The value that an earlier operator gave this name."""

    name: str


UNKNOWN = object()


def read_argument(kind: str, value: Any, name: str) -> Any:
    """Return the argument called ``name``, :class:`Ref` for an earlier value, or UNKNOWN."""
    if kind == "as_string":
        return value if name in TEXT_ARGUMENTS else UNKNOWN
    return ARGUMENTS[kind](value) if kind in ARGUMENTS else UNKNOWN


def _tensor_or_none(value: Mapping[str, Any]) -> Ref | None:
    return Ref(value["as_tensor"]["name"]) if "as_tensor" in value else None


def _size(value: Mapping[str, Any]) -> Any:
    ((kind, found),) = value.items()
    if kind == "as_name":
        return Ref(found)
    return float(found) if kind == "as_float" else found


def _device(value: Mapping[str, Any]) -> Any:
    return torch.device("cpu") if value.get("type") == "cpu" else UNKNOWN


ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    **{kind: lambda value: value for kind in PLAIN},
    **{kind: _size for kind in SIZES},
    "as_float": float,  # infinities and NaN are written as text
    "as_floats": lambda value: [float(one) for one in value],
    "as_none": lambda _: None,
    "as_tensor": lambda value: Ref(value["name"]),
    "as_tensors": lambda value: [Ref(one["name"]) for one in value],
    "as_optional_tensor": _tensor_or_none,
    "as_optional_tensors": lambda value: [_tensor_or_none(one) for one in value],
    "as_sym_ints": lambda value: [_size(one) for one in value],
    "as_scalar_type": lambda value: DTYPES.get(value, UNKNOWN),
    "as_layout": lambda value: LAYOUTS.get(value, UNKNOWN),
    "as_memory_format": lambda value: MEMORY_FORMATS.get(value, UNKNOWN),
    "as_device": _device,
}


def output_names(given: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], bool]:
    """Return the names, and whether the operator gives a list or tuple of them."""
    names: list[str] = []
    for one in given:
        ((kind, value),) = one.items()
        if kind == "as_tensors":
            names += [str(tensor["name"]) for tensor in value]
        elif kind == "as_none":
            names.append("")
        else:
            names.append(str(value["name"] if kind == "as_tensor" else value["as_name"]))
    is_list = len(given) > 1 or any("as_tensors" in one for one in given)
    return tuple(names), is_list


def resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """Put the values of names in their places."""
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, list):
        return [resolved(one, values) for one in value]
    return value


def names_in(value: Any) -> set[str]:
    """Return the names of all values in an argument."""
    if isinstance(value, Ref):
        return {value.name}
    if isinstance(value, list | tuple):
        return set().union(*(names_in(one) for one in value))
    return set()
