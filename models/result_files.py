"""The files of a command's results: checked before hours of work, written after them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models import whole_file
from models.errors import TandemError


class ResultFileError(TandemError):
    """A result cannot be written."""


def check_can_write(path: Path | None) -> None:
    """Raise :class:`ResultFileError` if the result would have nowhere to go; - is stdout."""
    if path is None:
        return
    try:
        whole_file.check_can_write(path)
    except OSError as error:
        raise ResultFileError(
            f"cannot write {path}: {error.strerror}; name a file in a folder that can be written"
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what a full disk raises into an error that says so."""
    try:
        yield
    except OSError as error:
        raise ResultFileError(
            f"cannot write {path}: {error.strerror}; make room, or name another file"
        ) from error


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write the file of ``--json``; - is stdout, None nothing."""
    text = json.dumps(content, indent=2)
    if str(path) == "-":
        print(text, flush=True)
    elif path is not None:
        with writing(path):
            whole_file.write_whole(path, text + "\n")
