"""Writes a TorchScript archive anew from what was read and checked.

PyTorch's readers of ZIP, pickle and code see these bytes and never the file's: what its readers
would take otherwise than ours (entries twice, comments with types, opcodes, text after the end) is
not in them, nor are example inputs and debug information.
"""

import ast
import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

from models.runtimes.torchscript.archive import OWN_EXTRA, ScriptArchive
from models.runtimes.torchscript.errors import ScriptError
from models.runtimes.torchscript.pickled import LISTS, ORDERED, TAGGED, TENSOR
from models.runtimes.torchscript.source import Source
from models.runtimes.torchscript.values import Instance, Storage, Tagged, Tensor, TypedList

MAKERS = {kind: name for name, kind in LISTS.items()}


def rewritten(
    archive: ScriptArchive, source: Source, pickles: dict[str, Any], extra: bytes | None = None
) -> io.BytesIO:
    """Return the archive's module as a new archive, ready to be read.

    Args:
        archive: the file, for the bytes of tensors.
        source: its checked code.
        pickles: "data" and "constants", as they were read.
        extra: what ``extra/tandem.json`` is to hold.

    Raises:
        ScriptError: an entry is damaged.

    """
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as out:
        for folder, value in pickles.items():
            writer = _Writer(source.path)
            _add(out, f"{folder}.pkl", writer.written(value))
            for key in writer.storages:
                _add(out, f"{folder}/{key}", archive.read(f"{folder}/{key}"))
        for name, tree in source.trees.items():
            _add(out, f"code/{name}", (ast.unparse(tree) + "\n").encode())
        _add(out, "version", f"{archive.version}\n".encode())
        _add(out, "byteorder", b"little")
        if extra is not None:
            _add(out, OWN_EXTRA, extra)
    written.seek(0)
    return written


def _add(out: zipfile.ZipFile, name: str, content: bytes) -> None:
    out.writestr(zipfile.ZipInfo(f"archive/{name}"), content)


class _Writer:
    """Writes one pickle in the opcodes that PyTorch's unpickler reads."""

    def __init__(self, path: Path) -> None:
        self._path, self._out = path, bytearray(b"\x80\x02")
        self._memo: dict[int, int] = {}
        self.storages: dict[str, None] = {}  # keys, in order

    def written(self, value: Any) -> bytes:
        self._value(value)
        return bytes(self._out) + pickle.STOP

    def _value(self, value: Any) -> None:
        if value is None or isinstance(value, bool):
            self._out += {None: pickle.NONE, True: pickle.NEWTRUE, False: pickle.NEWFALSE}[value]
        elif isinstance(value, int):
            self._int(value)
        elif isinstance(value, float):
            self._out += pickle.BINFLOAT + struct.pack(">d", value)
        elif isinstance(value, str):
            text = value.encode()
            self._out += pickle.BINUNICODE + struct.pack("<I", len(text)) + text
        elif id(value) in self._memo:
            self._out += pickle.LONG_BINGET + struct.pack("<I", self._memo[id(value)])
        else:
            self._object(value)

    def _int(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self._out += pickle.BININT + struct.pack("<i", value)
        else:
            self._out += pickle.LONG1 + b"\x08" + struct.pack("<q", value)

    def _object(self, value: Any) -> None:
        """Write something that may stand in several places, and be the same in all."""
        if isinstance(value, Instance):
            self._global(value.name)
            self._out += pickle.EMPTY_TUPLE + pickle.NEWOBJ
            self._remember(value)
            self._dict(value.state or {})
            self._out += pickle.BUILD
            return
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, TypedList):
            self._call(MAKERS[value.kind], value.values)
        elif isinstance(value, Tagged):
            self._call(TAGGED, value.value, value.kind)
        elif isinstance(value, tuple):
            self._tuple(*value)
        elif isinstance(value, list):
            self._out += pickle.EMPTY_LIST + pickle.MARK
            for part in value:
                self._value(part)
            self._out += pickle.APPENDS
        elif isinstance(value, dict):
            self._dict(value)
        else:
            raise ScriptError(f"{self._path} is damaged: a {type(value).__name__} by itself")
        self._remember(value)

    def _remember(self, value: Any) -> None:
        number = self._memo.setdefault(id(value), len(self._memo))
        self._out += pickle.LONG_BINPUT + struct.pack("<I", number)

    def _global(self, name: str) -> None:
        module, _, last = name.rpartition(".")
        self._out += pickle.GLOBAL + f"{module}\n{last}\n".encode()

    def _tuple(self, *parts: Any) -> None:
        self._out += pickle.MARK
        for part in parts:
            self._value(part)
        self._out += pickle.TUPLE

    def _call(self, name: str, *arguments: Any) -> None:
        self._global(name)
        self._tuple(*arguments)
        self._out += pickle.REDUCE

    def _dict(self, items: dict[Any, Any]) -> None:
        self._out += pickle.EMPTY_DICT + pickle.MARK
        for key, value in items.items():
            self._value(key)
            self._value(value)
        self._out += pickle.SETITEMS

    def _tensor(self, tensor: Tensor) -> None:
        self._global(TENSOR)
        self._out += pickle.MARK
        self._storage(tensor.storage)
        self._value(tensor.offset)
        self._tuple(*tensor.sides)
        self._tuple(*tensor.strides)
        self._value(tensor.requires_grad)
        self._global(ORDERED)
        self._out += pickle.EMPTY_TUPLE + pickle.REDUCE + pickle.TUPLE + pickle.REDUCE

    def _storage(self, storage: Storage) -> None:
        self.storages[storage.key] = None
        self._out += pickle.MARK
        self._value("storage")
        self._global(storage.kind)
        for part in (storage.key, "cpu", storage.numel):
            self._value(part)
        self._out += pickle.TUPLE + pickle.BINPERSID
