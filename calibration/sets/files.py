"""Checks a network's file before a library opens it: its kind, and where its weights are.

An ONNX file may name other files for its weights (``TensorProto.external_data``), by any path. A
network that somebody sends must not read files of other folders.
"""

from pathlib import Path

from models.errors import ModelSetError
from models.runtimes.onnx_file import onnx_facts

ONNX = ".onnx"
NUM_READ = 512  # bytes that are read of the beginning of a file
GIT_LFS = b"version https://git-lfs.github.com"
HTML = (b"<!doctype html", b"<html")
ZIP_MAP = "ZipMap"


def check_file(path: Path) -> set[str]:
    """Check that a file may be a network, and that an ONNX file's other files are in its folder.

    Returns:
        The operators of an ONNX file; none for files of other kinds.

    Raises:
        ModelSetError: it is something else, its output is not a tensor, or weights are missing or
            outside of its folder.

    """
    _check_beginning(path)
    if path.suffix != ONNX or not path.is_file():
        return set()
    facts = onnx_facts(_content(path), str(path))
    if ZIP_MAP in facts.operators:
        raise ModelSetError(
            f"{path} answers a list of dictionaries (ZipMap, as Custom Vision and scikit-learn "
            "export it): export it again without ZipMap, or cut it behind the softmax"
        )
    _check_external(path, facts.external)
    return facts.operators


def _check_beginning(path: Path) -> None:
    try:
        with path.open("rb") as opened:
            start = opened.read(NUM_READ)
    except OSError:  # reported when it is read
        return
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


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelSetError(f"cannot read {path}: {error.strerror}") from error


def _check_external(path: Path, locations: set[str]) -> None:
    folder = path.parent.resolve()
    for location in sorted(locations):
        weights = path.parent / location
        if not weights.resolve().is_relative_to(folder):
            raise ModelSetError(
                f"{path} keeps weights outside of its folder ({location}): export it again with "
                "its weights inside, or next to it"
            )
        if not weights.is_file():
            raise ModelSetError(
                f"{path} keeps weights in {location}, which is missing: put it next to the file"
            )
