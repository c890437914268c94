"""Result files and the user's folders.

Results are checked before hours of work, and written after them in one step: readers never see a
part of a file, and a full disk leaves the old one. Folders of the user follow the platform's rules;
an account may have no home.
"""

import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.errors import TandemError

APPLICATION = "tandem"


class ResultFileError(TandemError):
    """A result cannot be written."""


def check_can_write(path: Path | None) -> None:
    """Raise :class:`ResultFileError` if the result would have nowhere to go; - is stdout."""
    if path is None or str(path) == "-" or _is_special(path):
        return
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it")
        partial = _partial(path.resolve())
        partial.touch()
        partial.unlink()
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
    except (OSError, RuntimeError) as error:
        problem = getattr(error, "strerror", "its links lead in a circle")
        raise ResultFileError(
            f"cannot write {path}: {problem}; name a file in a folder that can be written"
        ) from error


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write the file of ``--json``; - is stdout, None nothing."""
    text = json.dumps(content, indent=2)
    if str(path) == "-":
        print(text, flush=True)
    elif path is not None:
        write_result(path, text + "\n")


def write_result(
    path: Path, content: str | bytes, check: Callable[[Path], object] = lambda _: None
) -> None:
    """Write a file as :func:`write_whole` does; raise :class:`ResultFileError` on a full disk."""
    try:
        write_whole(path, content, check)
    except OSError as error:
        raise ResultFileError(
            f"cannot write {path}: {error.strerror}; make room, or name another file"
        ) from error


def write_whole(
    path: Path,
    content: str | bytes,
    check: Callable[[Path], object] = lambda _: None,
    mode: int = 0o666,
) -> None:
    """Write bytes, or a text as UTF-8, unless ``check`` raises for the new file; follows a link.

    ``mode`` are the new file's permissions, less the umask.

    Raises:
        OSError: there is no room, or the folder cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    if _is_special(path):
        path.write_bytes(data)
        return
    path = path.resolve()
    partial = _partial(path)
    try:
        partial.touch(mode)  # before it has content
        partial.write_bytes(data)
        check(partial)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    """Whether the path is a device or a pipe, as /dev/stdout."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def with_home(path: str | Path) -> Path:
    """Return the path with ``~`` as the home folder, or as it is if there is none."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  # Path's raises


def user_folder(kind: Callable[[str], Path], *below: str) -> Path | None:
    """Return a folder of the user's; None if neither HOME, XDG nor passwd names a home.

    ``kind`` is a function of platformdirs, as ``user_cache_path``.
    """
    try:
        folder = kind(APPLICATION).joinpath(*below)
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # older releases return "~/.cache" literally


def needed_folder(kind: Callable[[str], Path], *below: str) -> Path:
    """Return a folder of the user's; raise :class:`TandemError` if there is no home."""
    if (folder := user_folder(kind, *below)) is None:
        raise TandemError("this account has no home folder; set HOME to one that can be written to")
    return folder
