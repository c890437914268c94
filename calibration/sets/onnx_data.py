"""Checks where an ONNX file keeps its weights: beside it, in its own folder, or refused.

An ONNX file may name other files for its weights (``TensorProto.external_data``), by any path. A
network that somebody sends must not read files of other folders.
"""

from pathlib import Path

from models.errors import ModelSetError
from models.runtimes.onnx_file import onnx_facts


def check_external_data(path: Path) -> None:
    """Check that what an ONNX file keeps elsewhere is in its folder.

    Raises:
        ModelSetError: it is outside, or missing.

    """
    folder = path.parent.resolve()
    for location in sorted(external_locations(path)):
        found = path.parent / location
        if not found.resolve().is_relative_to(folder):
            raise ModelSetError(
                f"{path} keeps weights outside of its folder ({location}): export it again with "
                "its weights inside, or beside it"
            )
        if not found.is_file():
            raise ModelSetError(
                f"{path} keeps weights in {location}, which is missing: put it beside the file"
            )


def external_locations(path: Path) -> set[str]:
    """Return the files that an ONNX file names; none if it is no ONNX."""
    try:
        return onnx_facts(path.read_bytes(), str(path)).external
    except (OSError, ModelSetError):  # whoever reads it says what is wrong with it
        return set()
