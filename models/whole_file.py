"""Writes a file in one step: readers never see a part, and a full disk leaves the old file."""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path


def check_can_write(path: Path) -> None:
    """Raise :class:`OSError` if :func:`write_whole` could not write ``path``; - is stdout."""
    if str(path) == "-" or (path.exists() and not (path.is_file() or path.is_dir())):
        return
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it")
    try:
        partial = _partial(path.resolve())
    except RuntimeError as error:
        raise OSError(errno.ELOOP, "its links lead in a circle") from error
    partial.touch()
    partial.unlink()
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it is read-only")


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
    if path.exists() and not path.is_file():  # a device or a pipe, as /dev/stdout
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


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")
