"""Reads the tensors of a PyTorch file (.pth, .pt) without PyTorch, and runs nothing of it.

Such a file holds pickles. A pickle names functions to call, so it can run anything; this reader
knows a dozen names, which make tensors and dictionaries, and refuses the file at any other. Both
formats are read: a zip archive (since PyTorch 1.6), and before that several pickles one after
another, then the bytes of each storage.
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

MAGIC = 0x1950A86A20F9469CFC6C  # of the old format's first pickle
PROTOCOL = 1001  # its second
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
        ModelSetError: no such file, a damaged one, or one that names anything but tensors.

    """
    try:
        found, storages = _of_zip(data) if data[:2] == b"PK" else _of_pickles(data)
    except _ForbiddenNameError as error:
        raise ModelSetError(
            f"{name} names {error.args[0]} in its pickle: tensors alone are read, and nothing of "
            "it was run. If you trust it, export the network: tandem models add --trust"
        ) from None
    except Exception as error:  # a damaged pickle raises any kind
        raise ModelSetError(
            f"{name} is no PyTorch file of tensors, or is damaged ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(found, Mapping) or not found:
        raise ModelSetError(f"{name} holds a {type(found).__name__}: a state dict is needed")
    return {str(key): _tensor(value, storages, f"{key} of {name}") for key, value in found.items()}


class _ForbiddenNameError(Exception):
    """The pickle names something that is not of tensors."""


@dataclass(frozen=True, slots=True)
class _Storage:
    """Bytes that tensors are views of."""

    key: str
    dtype: np.dtype[Any]
    num_items: int


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor before its bytes are read."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in items


@dataclass(frozen=True, slots=True)
class _Name:
    """An allowed name of the pickle; no pickle can set an attribute of it."""

    make: Callable[..., Any] | None = None
    dtype: np.dtype[Any] | None = None

    def __setstate__(self, _: Any) -> None:
        raise pickle.UnpicklingError("a name is given attributes")

    def __call__(self, *arguments: Any) -> Any:
        if self.make is None:
            raise TypeError("a storage is not called")
        return self.make(*arguments)


class _Dictionary(dict[Any, Any]):
    """An OrderedDict; modules add attributes to theirs, which are passed over."""

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
    """Knows :data:`NAMES`, and storages by their keys."""

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
    """Read the format before zip archives."""
    file = io.BytesIO(data)
    if (magic := _Unpickler(file).load()) != MAGIC:
        raise pickle.UnpicklingError(f"begins with {str(magic)[:40]!r}")
    if (protocol := _Unpickler(file).load()) != PROTOCOL:
        raise pickle.UnpicklingError(f"protocol {protocol}; {PROTOCOL} is read")
    if not _Unpickler(file).load()["little_endian"]:
        raise pickle.UnpicklingError("written on a big-endian machine")
    found = _Unpickler(file).load()
    keys = [str(key) for key in _Unpickler(file).load()]
    sizes = {view.storage.key: view.storage for view in _views(found)}
    storages: dict[str, memoryview] = {}
    place, content = file.tell(), memoryview(data)
    for key in keys:
        (num_items,) = struct.unpack_from("<q", content, place)
        place += 8
        num_bytes = num_items * sizes[key].dtype.itemsize
        storages[key] = content[place : place + num_bytes]
        place += num_bytes
    return found, storages


def _of_zip(data: bytes) -> tuple[Any, dict[str, memoryview]]:
    """Read an archive: NAME/data.pkl, and NAME/data/KEY for each storage."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (pickled,) = [
            n for n in archive.namelist() if n.endswith("/data.pkl") and n.count("/") == 1
        ]
        top = pickled.removesuffix("data.pkl")
        if f"{top}byteorder" in archive.namelist() and archive.read(f"{top}byteorder") != b"little":
            raise pickle.UnpicklingError("written on a big-endian machine")
        found = _Unpickler(io.BytesIO(archive.read(pickled))).load()
        keys = {view.storage.key for view in _views(found)}
        if any(archive.getinfo(f"{top}data/{key}").compress_type for key in keys):
            raise pickle.UnpicklingError("its storages are compressed")  # PyTorch never does
        return found, {key: memoryview(archive.read(f"{top}data/{key}")) for key in keys}


def _views(found: Any) -> list[_View]:
    values = found.values() if isinstance(found, Mapping) else ()
    return [value for value in values if isinstance(value, _View)]


def _tensor(view: Any, storages: Mapping[str, memoryview], name: str) -> npt.NDArray[Any]:
    """Return a copy of what a view shows; nothing outside of its storage, nor more than it has."""
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
