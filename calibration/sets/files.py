"""Checks a network's file before a library opens it, and converts PyTorch's files.

An ONNX file may name other files for its weights (``TensorProto.external_data``), by any path. A
network that somebody sends must not read files of other folders.

The kind of a PyTorch file is known by the names in its ZIP archive, without loading it. Only a
child process loads it, never a service. A crash or timeout becomes a one-line error, and processes
that the file starts end with the child.
"""

import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from calibration.sets.input import TensorLayout
from models.child_process import ChildDiedError, last_words, run_apart
from models.errors import ModelSetError, reading
from models.image import Size
from models.machine import check_installed
from models.onnx_runtime import onnx_facts
from models.record import SUFFIXES, RuntimeName

ONNX = ".onnx"
NUM_READ = 512  # bytes that are read of the beginning of a file
GIT_LFS = b"version https://git-lfs.github.com"
HTML = (b"<!doctype html", b"<html")
HDF5 = b"\x89HDF\r\n\x1a\n"
KERAS_ZIP = {"config.json", "model.weights.h5"}
SAVED_MODEL = "saved_model.pb"
ZIP_MAP = "ZipMap"
# TorchScript (torch.jit.save), or a pickle of torch.save: what is inside says which.
PYTORCH_SUFFIXES = (".pt2", ".pt", ".pth", ".ts", ".torchscript")
Kind = Literal["program", "script"]  # of torch.export.save, of torch.jit.save
INSTEAD = (
    "Save the network with torch.export.save(torch.export.export(module.eval(), (example,), "
    "dynamic_shapes=...), 'net.pt2') and add that with --trust, or export ONNX "
    "(torch.onnx.export), which runs nothing"
)
LIMIT_S = 900.0  # the largest networks convert in two minutes, on a slow machine in ten


def check_file(path: Path) -> set[str]:
    """Check that a file may be a network, and that an ONNX file's other files are in its folder.

    Returns:
        The operators of an ONNX file; none for files of other kinds.

    Raises:
        ModelSetError: it is something else, its output is not a tensor, or weights are missing or
            outside of its folder.
    """
    check_kind(path)
    if path.suffix != ONNX or not path.is_file():
        return set()
    with reading(path):
        facts = onnx_facts(path.read_bytes(), str(path))
    if ZIP_MAP in facts.operators:
        raise ModelSetError(
            f"{path} answers a list of dictionaries (ZipMap, as Custom Vision and scikit-learn "
            "export it): export it again without ZipMap, or cut it behind the softmax"
        )
    for location in sorted(facts.external):
        weights = path.parent / location
        if not weights.resolve().is_relative_to(path.parent.resolve()):
            raise ModelSetError(
                f"{path} keeps weights outside of its folder ({location}): export it again with "
                "its weights inside, or next to it"
            )
        if not weights.is_file():
            raise ModelSetError(
                f"{path} keeps weights in {location}, which is missing: put it next to the file"
            )
    return facts.operators


def check_kind(path: Path) -> None:
    """Raise :class:`ModelSetError` if a file is known to be no network here."""
    if path.name == SAVED_MODEL or (path / SAVED_MODEL).is_file():
        folder = path.parent if path.name == SAVED_MODEL else path
        raise ModelSetError(
            f"{path} is a SavedModel of TensorFlow: convert it with OpenVINO's own command, ovc "
            f"{folder} --output_model net, and add net.xml"
        )
    if path.is_dir():
        raise ModelSetError(f"{path} is a folder: give the network's file")
    try:
        with path.open("rb") as opened:
            start = opened.read(NUM_READ)
    except OSError:  # reported when it is read
        return
    if start.startswith(HDF5) or _is_keras_zip(path, start):
        raise ModelSetError(
            f"{path} is a file of Keras, which Keras alone reads: export it there, as "
            f"keras.models.load_model({path.name!r}).export('net.onnx', format='onnx'), and add "
            "net.onnx"
        )
    if not start:
        raise ModelSetError(f"{path} is empty: download it, or export it again")
    if start.startswith(GIT_LFS):
        raise ModelSetError(
            f"{path} is a pointer of Git LFS, not the network: git lfs pull fetches that"
        )
    if start.lstrip().lower().startswith(HTML):
        raise ModelSetError(
            f"{path} is a web page (HTML), not the network: download the file itself, as its raw "
            "link gives it"
        )


def _is_keras_zip(path: Path, start: bytes) -> bool:
    try:
        with zipfile.ZipFile(path) as opened:
            return start.startswith(b"PK") and set(opened.namelist()) >= KERAS_ZIP
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError):
        return False


def kind_of(path: Path) -> Kind:
    """Return the kind of network in a PyTorch file.

    Raises :class:`ModelSetError` if the file has no network: it is damaged, or a pickle of weights
    or of a module.
    """
    try:
        with zipfile.ZipFile(path) as opened:
            names = opened.namelist()
    except OSError as error:
        raise ModelSetError(f"cannot read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ModelSetError(
            f"{path} is no network of PyTorch ({error}): it was cut short, or is a pickle of "
            f"torch.save. {INSTEAD}"
        ) from error
    if any(name.endswith("/archive_format") for name in names):
        return "program"
    if any("/code/" in name for name in names):
        return "script"
    if any(name.endswith("/data.pkl") for name in names):
        raise ModelSetError(
            f"{path} is a checkpoint of torch.save: weights, or a module without code. {INSTEAD}"
        )
    raise ModelSetError(f"{path} is a ZIP archive, and no network of PyTorch. {INSTEAD}")


def check_trusted(path: Path, *, is_trusted: bool) -> None:
    """Raise :class:`ModelSetError` unless the user has declared a PyTorch file as trusted."""
    if not is_trusted:
        raise ModelSetError(
            f"{path} is a PyTorch file, and to load it is to run code that it holds. If you trust "
            "whoever made it, say --trust: it is loaded once, in a process of its own, and "
            "converted. Else ask for ONNX (torch.onnx.export), which runs nothing"
        )


@dataclass(frozen=True)
class ConversionTask:
    """The task of the child process."""

    path: Path
    kind: Kind
    made: Path  # the IR (.xml) or ONNX file to write
    input_size: Size | None
    layout: TensorLayout | None


@contextmanager
def converted(
    path: Path,
    runtime: RuntimeName,
    input_size: Size | None,
    layout: TensorLayout | None,
    *,
    is_trusted: bool,
    limit_s: float = LIMIT_S,
) -> Iterator[Path]:
    """Convert a PyTorch file for ``runtime``; the file exists during the block.

    Raises:
        MissingExtraError: torch is not installed.
        ModelSetError: the file is not a network, not trusted, or cannot be converted.
    """
    kind = kind_of(path)
    check_trusted(path, is_trusted=is_trusted)
    check_installed("torch", "torch", f"models add of {path.name}")
    with tempfile.TemporaryDirectory(prefix="tandem-add-") as name:
        made = Path(name) / f"network{SUFFIXES[runtime]}"
        task = ConversionTask(path.absolute(), kind, made, input_size, layout)
        log = Path(name) / "log"
        try:
            with log.open("wb") as printed:
                run_apart(convert_here, task, limit_s=limit_s, printed=printed)
        except TimeoutError:
            raise ModelSetError(
                f"{path} was not converted within {limit_s:g} s, and was given up. {INSTEAD}"
            ) from None
        except ChildDiedError as error:
            raise ModelSetError(
                f"{path}: the process that loaded it died ({error}; {last_words(log)}): the file "
                f"is damaged, or of another PyTorch. {INSTEAD}"
            ) from None
        yield made


def convert_here(task: ConversionTask) -> None:
    """Convert in this process, which runs code of the file; see :mod:`pytorch_child`."""
    warnings.simplefilter("ignore")  # torch.jit is deprecated
    from calibration.sets.pytorch_child import convert

    convert(task)
