"""Reads the tensors of a PyTorch file (.pth, .pt) without PyTorch and without running its code.

The file holds pickles. A pickle names functions to call, so it can run any code. This reader
accepts a dozen names, which make tensors and dictionaries, and refuses files with other names. It
reads both formats: a zip archive (since PyTorch 1.6), and the older sequence of pickles followed by
the bytes of each storage.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import ModelSetError

MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of the old format
PROTOCOL = 1001  # its second pickle
Tensors = dict[str, npt.NDArray[Any]]
DTYPES: dict[str, np.dtype[Any]] = {
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "HalfStorage": np.dtype("<f2"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}


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
        state, storages = _of_zip(data) if data[:2] == b"PK" else _of_pickles(data)
    except _ForbiddenNameError as error:
        raise ModelSetError(
            f"{name} names {error.args[0]} in its pickle: tensors alone are read, and nothing of "
            "it was run. If you trust it, export the network: tandem models add --trust"
        ) from None
    except Exception as error:  # damaged pickles raise errors of any kind
        raise ModelSetError(
            f"{name} is no PyTorch file of tensors, or is damaged ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(state, Mapping) or not state:
        raise ModelSetError(f"{name} holds a {type(state).__name__}: a state dict is needed")
    return {str(key): _tensor(value, storages, f"{key} of {name}") for key, value in state.items()}


class _ForbiddenNameError(Exception):
    """The pickle has a name that is not needed for tensors."""


@dataclass(frozen=True, slots=True)
class _Storage:
    """The bytes of one or more tensors."""

    key: str
    dtype: np.dtype[Any]
    num_items: int


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor whose bytes have not been read yet."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in items


@dataclass(frozen=True, slots=True)
class _Name:
    """An allowed name in a pickle; pickles cannot set its attributes."""

    make: Callable[..., Any] | None = None
    dtype: np.dtype[Any] | None = None

    def __setstate__(self, _: Any) -> None:
        raise pickle.UnpicklingError("a name is given attributes")

    def __call__(self, *arguments: Any) -> Any:
        if self.make is None:
            raise TypeError("a storage is not called")
        return self.make(*arguments)


class _Dictionary(dict[Any, Any]):
    """An OrderedDict that ignores the attributes which modules add."""

    __slots__ = ()

    def __setstate__(self, _: Any) -> None:
        pass


def _view(storage: _Storage, offset: int, shape: Any, strides: Any, *_: Any) -> _View:
    if not isinstance(storage, _Storage):
        raise TypeError("a tensor without a storage")
    return _View(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


NAMES = {
    ("collections", "OrderedDict"): _Name(lambda items=(): _Dictionary(items)),
    ("torch._utils", "_rebuild_tensor_v2"): _Name(_view),
    ("torch._utils", "_rebuild_parameter"): _Name(lambda data, *_: data),
    **{("torch", name): _Name(dtype=dtype) for name, dtype in DTYPES.items()},
}


class _Unpickler(pickle.Unpickler):
    """Resolves only :data:`NAMES`, and storages by their keys."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return NAMES[module, name]
        except KeyError:
            raise _ForbiddenNameError(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> _Storage:
        kind, named, key, _, num_items, *_ = pid
        if kind != "storage" or not isinstance(named, _Name) or named.dtype is None:
            raise pickle.UnpicklingError(f"unknown object {kind!r}")
        return _Storage(str(key), named.dtype, int(num_items))


def _of_pickles(data: bytes) -> tuple[Any, dict[str, memoryview]]:
    """Read the format that PyTorch used before zip archives."""
    file = io.BytesIO(data)
    if (magic := _Unpickler(file).load()) != MAGIC:
        raise pickle.UnpicklingError(f"begins with {str(magic)[:40]!r}")
    if (protocol := _Unpickler(file).load()) != PROTOCOL:
        raise pickle.UnpicklingError(f"protocol {protocol}; {PROTOCOL} is read")
    if not _Unpickler(file).load()["little_endian"]:
        raise pickle.UnpicklingError("written on a big-endian machine")
    state = _Unpickler(file).load()
    keys = [str(key) for key in _Unpickler(file).load()]
    sizes = {view.storage.key: view.storage for view in _views(state)}
    storages: dict[str, memoryview] = {}
    place, content = file.tell(), memoryview(data)
    for key in keys:
        (num_items,) = struct.unpack_from("<q", content, place)
        place += 8
        num_bytes = num_items * sizes[key].dtype.itemsize
        storages[key] = content[place : place + num_bytes]
        place += num_bytes
    return state, storages


def _of_zip(data: bytes) -> tuple[Any, dict[str, memoryview]]:
    """Read an archive: NAME/data.pkl, and NAME/data/KEY for each storage."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (pickled,) = [
            n for n in archive.namelist() if n.endswith("/data.pkl") and n.count("/") == 1
        ]
        top = pickled.removesuffix("data.pkl")
        if f"{top}byteorder" in archive.namelist() and archive.read(f"{top}byteorder") != b"little":
            raise pickle.UnpicklingError("written on a big-endian machine")
        state = _Unpickler(io.BytesIO(archive.read(pickled))).load()
        keys = {view.storage.key for view in _views(state)}
        if any(archive.getinfo(f"{top}data/{key}").compress_type for key in keys):
            raise pickle.UnpicklingError("its storages are compressed")  # PyTorch never does
        return state, {key: memoryview(archive.read(f"{top}data/{key}")) for key in keys}


def _views(state: Any) -> list[_View]:
    values = state.values() if isinstance(state, Mapping) else ()
    return [value for value in values if isinstance(value, _View)]


def _tensor(view: Any, storages: Mapping[str, memoryview], name: str) -> npt.NDArray[Any]:
    """Return a copy of a view's numbers; refuses views that exceed their storage."""
    if not isinstance(view, _View):
        raise ModelSetError(f"{name} is a {type(view).__name__}: a state dict has tensors alone")
    content = storages[view.storage.key]
    num_items = len(content) // view.storage.dtype.itemsize
    sides = list(zip(view.shape, view.strides, strict=False))
    last = view.offset + sum((side - 1) * stride for side, stride in sides)
    is_inside = len(view.shape) == len(view.strides) and 0 <= view.offset <= last < num_items
    if not is_inside or min([0, *view.strides]) < 0 or prod(view.shape) > num_items:
        raise ModelSetError(f"{name} reaches out of its {num_items} values: the file is damaged")
    items = np.frombuffer(content, view.storage.dtype, num_items)[view.offset :]
    strides = [stride * items.itemsize for stride in view.strides]
    return np.lib.stride_tricks.as_strided(items, view.shape, strides, writeable=False).copy()
