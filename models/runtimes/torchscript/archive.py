"""Reads the ZIP archive of a TorchScript file: which entries it has, and their bytes.

An archive of ``torch.jit.save`` has one folder with ``data.pkl`` (the module), ``constants.pkl``,
``data/N`` and ``constants/N`` (raw tensors), ``code/**.py`` (deflated), ``version`` and
``byteorder``. Sizes are checked before anything is read. Example inputs, debug information and
files of the user's (``extra/``) are not opened, but for the one that ``tandem models add`` writes.
"""

import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from models.runtimes.torchscript.errors import INSTEAD, ScriptError

MAX_FILE_BYTES = 2**32
MAX_ENTRIES = 2**16
MAX_TEXT_BYTES = 2**25  # of the code in all, and of each pickle
MIN_VERSION, MAX_VERSION = 3, 10  # of the format: PyTorch 1.6 to 2.13
OWN_EXTRA = "extra/tandem.json"
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
ENCRYPTED = 1  # of an entry's flag bits
PICKLES = ("data.pkl", "constants.pkl")
TRACED_INPUTS = "traced_inputs"  # .pkl: what the module was traced with; read for its sizes alone
CODE = re.compile(r"code/__torch__(/[A-Za-z_][A-Za-z0-9_]*)*\.py")
STORAGE = re.compile(r"(data|constants)/[0-9]{1,9}")
# Written by PyTorch, and not needed to run: left out of what is read.
IGNORED = re.compile(
    r"code/.*\.debug_pkl|extra/.*|traced_inputs/[0-9]+|\.data/.*|\.format_version"
    r"|\.storage_alignment"
)
KNOWN = {*PICKLES, f"{TRACED_INPUTS}.pkl", "version", "byteorder", ".data/version", OWN_EXTRA}


@dataclass(frozen=True)
class ScriptArchive:
    """The entries of one file, by their names without the folder; open until its context ends."""

    path: Path
    zip: zipfile.ZipFile
    entries: dict[str, zipfile.ZipInfo]
    version: int
    code: dict[str, str]  # "__torch__/torch/nn/functional.py": its text

    def read(self, name: str) -> bytes:
        """Return an entry's bytes.

        Raises:
            ScriptError: it is damaged.

        """
        try:
            return self.zip.read(self.entries[name])
        except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise ScriptError(f"{self.path} is damaged: {name}: {error}") from error

    def size_of(self, folder: str, key: str) -> int | None:
        """Return the bytes of a tensor's storage; None: there is none of that name."""
        entry = self.entries.get(f"{folder}/{key}")
        return None if entry is None else entry.file_size


@contextmanager
def opened_script(path: Path) -> Iterator[ScriptArchive]:
    """Open a TorchScript file for reading.

    Raises:
        ScriptError: no TorchScript, damaged, or with entries that torch.jit.save does not write.

    """
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise ScriptError(f"{path} has {size} bytes; TorchScript of {MAX_FILE_BYTES} is read")
        opened = zipfile.ZipFile(path)
    except OSError as error:
        raise ScriptError(f"cannot read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ScriptError(
            f"{path} is no TorchScript file ({error}); if it is a pickle of torch.save, no pickle "
            f"is loaded here. {INSTEAD}"
        ) from error
    with opened:
        entries = _entries(opened, path, size)
        whole = ScriptArchive(path, opened, entries, 0, {})
        code = {name[5:]: _text(whole, name) for name in entries if CODE.fullmatch(name)}
        yield ScriptArchive(path, opened, entries, _version(whole), code)


def _entries(opened: zipfile.ZipFile, path: Path, file_bytes: int) -> dict[str, zipfile.ZipInfo]:
    found = opened.infolist()
    if len(found) > MAX_ENTRIES:
        raise ScriptError(f"{path} has {len(found)} entries; {MAX_ENTRIES} are the limit")
    stored = [entry for entry in found if entry.compress_type == zipfile.ZIP_STORED]
    if (total := sum(entry.file_size for entry in stored)) > file_bytes:
        raise ScriptError(f"{path}: its entries have {total} bytes, the file {file_bytes}")
    root = _root(path, [entry.filename for entry in found])
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in found:
        name = entry.filename.removeprefix(f"{root}/")
        if name in entries:
            raise ScriptError(f"{path} has the entry {entry.filename!r} twice")
        entries[name] = entry
    if strange := next((name for name in entries if not _is_known(name)), None):
        raise ScriptError(
            f"{path} has the entry {strange!r}, which torch.jit.save does not write. {INSTEAD}"
        )
    _check_compression(path, entries)
    _check_sizes(path, entries)
    return entries


def _root(path: Path, names: list[str]) -> str:
    """Return the one folder of the archive, after telling what other kinds of file it may be."""
    if any(name.endswith("/archive_format") for name in names):
        raise ScriptError(f"{path} is of torch.export: call it {path.stem}.pt2")
    if not any("/code/" in name for name in names):
        if any(name.endswith("/data.pkl") for name in names):
            raise ScriptError(
                f"{path} is a checkpoint of torch.save, a pickle: to load it is to run what is in "
                f"it, so it is not opened. {INSTEAD}"
            )
        raise ScriptError(f"{path} is no TorchScript file: it has no code. {INSTEAD}")
    roots = {name.partition("/")[0] for name in names}
    odd = next((n for n in names if ".." in n.split("/") or "\\" in n or "\0" in n), None)
    if len(roots) != 1 or "" in roots or odd is not None:
        told = repr(odd) if odd is not None else f"folders {sorted(roots)[:3]}"
        raise ScriptError(f"{path} has {told}; torch.jit.save writes one folder, and stays in it")
    return roots.pop()


def _is_known(name: str) -> bool:
    patterns = (CODE, STORAGE, IGNORED)
    return name in KNOWN or any(pattern.fullmatch(name) for pattern in patterns)


def _check_compression(path: Path, entries: dict[str, zipfile.ZipInfo]) -> None:
    """Check that what may be large is stored as it is; code may be deflated, within its limit."""
    for name, entry in entries.items():
        allowed = {zipfile.ZIP_STORED} if STORAGE.fullmatch(name) else {*COMPRESSIONS}
        if entry.compress_type not in allowed or entry.flag_bits & ENCRYPTED:
            raise ScriptError(
                f"{path}: {name!r} is compressed or encrypted, as torch.jit.save does not do it"
            )


def _check_sizes(path: Path, entries: dict[str, zipfile.ZipInfo]) -> None:
    if missing := [name for name in PICKLES if name not in entries]:
        raise ScriptError(f"{path} is damaged: it has no {missing[0]}")
    code = sum(entry.file_size for name, entry in entries.items() if CODE.fullmatch(name))
    small = {name: entries[name].file_size for name in KNOWN if name in entries} | {"code": code}
    for name, size in small.items():
        if size > MAX_TEXT_BYTES:
            raise ScriptError(f"{path}: {name} has {size} bytes; {MAX_TEXT_BYTES} is the limit")


def _text(archive: ScriptArchive, name: str) -> str:
    try:
        return archive.read(name).decode("ascii")
    except UnicodeDecodeError as error:
        raise ScriptError(f"{archive.path}: {name} is not plain ASCII: {error}") from error


def _version(archive: ScriptArchive) -> int:
    """Return the version of the format: operators of older ones are brought up by PyTorch."""
    place = ".data/version" if ".data/version" in archive.entries else "version"
    text = _text(archive, place).strip() if place in archive.entries else "none"
    if not text.isdigit() or not MIN_VERSION <= int(text[:9]) <= MAX_VERSION:
        raise ScriptError(
            f"{archive.path} is of format version {text[:20]!r}; {MIN_VERSION} to {MAX_VERSION} "
            "are read: save it again with PyTorch 2.13"
        )
    if "byteorder" in archive.entries and _text(archive, "byteorder").strip() != "little":
        raise ScriptError(f"{archive.path} was written on a big-endian machine; save it on another")
    return int(text)
