"""Reads an ExportedProgram's ``.pt2`` without ``torch.export.load``: JSON and raw weights only.

torch.export.load (2.13) unpickles the sample inputs and whatever weights say ``use_pickle``, hands
expressions of the JSON to SymPy, which evaluates them as Python, and looks operators up anywhere
below ``torch``: a file can run code. Here nothing of that is read. The archive is a ZIP file of
uncompressed entries (the graph as JSON in ``models/``, weights as their bytes in ``data/``); the
sample inputs, a pickle that every archive has, are never opened.
"""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import ModelSetError

SCHEMA_MAJOR = 8  # of the JSON; another one may mean other things
MAX_JSON_BYTES = 2**28
PLACES = {"weights": "tensors of the network", "constants": "tensors of its code"}


class ArchiveError(ModelSetError):
    """A ``.pt2`` that is damaged, of another format, or wants more than reading."""

    code = "torch_archive"


@dataclass(frozen=True)
class Archive:
    """The parts of one ``.pt2``."""

    path: Path
    program: dict[str, Any]  # the whole of models/NAME.json
    payloads: dict[str, dict[str, Any]]  # tensor's name: PayloadMeta of torch's schema
    content: dict[str, bytes]  # file of a payload: its bytes

    @property
    def graph_module(self) -> dict[str, Any]:
        found: dict[str, Any] = self.program["graph_module"]
        return found


def read_archive(path: Path) -> Archive:
    """Read the graph and the raw bytes of its tensors.

    Raises:
        ArchiveError: no .pt2, damaged, of another schema, or with pickled tensors.

    """
    try:
        with zipfile.ZipFile(path) as opened:
            _check_entries(opened, path)
            return _read(opened, path)
    except OSError as error:
        raise ArchiveError(f"cannot read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise ArchiveError(f"{path} is no .pt2 file of torch.export.save: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ArchiveError(f"{path} is damaged: {type(error).__name__} {error}") from error


def _check_entries(opened: zipfile.ZipFile, path: Path) -> None:
    names = opened.namelist()
    if any("/code/" in f"/{name}" for name in names):
        raise ArchiveError(
            f"{path} is TorchScript, not of torch.export: call it {path.stem}.torchscript, and "
            "give it to tandem models add, which checks it as such"
        )
    packed = [entry.filename for entry in opened.infolist() if entry.compress_type]
    if packed:
        raise ArchiveError(f"{path}: {packed[0]} is compressed; torch.export.save does not do that")
    if not any(name.endswith("/archive_format") for name in names):
        kind = "a checkpoint of torch.save, a pickle" if _is_pickle(names) else "no .pt2 file"
        raise ArchiveError(
            f"{path} is {kind}; a member is a .pt2 that torch.export.save of PyTorch 2.13 wrote"
        )


def _is_pickle(names: list[str]) -> bool:
    return any(name.endswith("/data.pkl") for name in names)


def _read(opened: zipfile.ZipFile, path: Path) -> Archive:
    root = next(n for n in opened.namelist() if n.endswith("/archive_format")).rpartition("/")[0]
    entry = _only(opened, f"{root}/models/", ".json", path)
    name = entry.rpartition("/")[2].removesuffix(".json")
    program = _json(opened, entry)
    major = program.get("schema_version", {}).get("major")
    if major != SCHEMA_MAJOR:
        raise ArchiveError(
            f"{path} has schema {major} (torch {program.get('torch_version', 'unknown')}); schema "
            f"{SCHEMA_MAJOR} is read: export it again with PyTorch 2.13"
        )
    payloads: dict[str, dict[str, Any]] = {}
    content: dict[str, bytes] = {}
    for place, what in PLACES.items():
        config = f"{root}/data/{place}/{name}_{place}_config.json"
        for tensor, payload in _json(opened, config)["config"].items():
            if payload.get("use_pickle"):
                raise ArchiveError(
                    f"{path}: {tensor!r} of the {what} is pickled, and no pickle is loaded from a "
                    "model set: export the network in plain CPU tensors"
                )
            file = f"{place}/{payload['path_name']}"
            payloads[tensor] = {**payload, "file": file}
            if file not in content:
                content[file] = opened.read(f"{root}/data/{file}")
    return Archive(path, program, payloads, content)


def _only(opened: zipfile.ZipFile, folder: str, suffix: str, path: Path) -> str:
    found = [n for n in opened.namelist() if n.startswith(folder) and n.endswith(suffix)]
    if len(found) != 1:
        raise ArchiveError(f"{path} has {len(found)} programs; a member has one")
    return found[0]


def _json(opened: zipfile.ZipFile, entry: str) -> dict[str, Any]:
    if (size := opened.getinfo(entry).file_size) > MAX_JSON_BYTES:
        raise ValueError(f"{entry} has {size} bytes; {MAX_JSON_BYTES} is the limit")
    found = json.loads(opened.read(entry))
    if not isinstance(found, dict):
        raise TypeError(f"{entry} is no JSON object")
    return found
