"""Tells that a file is another one than before: written, replaced, linked elsewhere, or gone."""

from pathlib import Path

Stamp = tuple[int, int] | None  # None: there is no file


def file_stamp(path: Path) -> Stamp:
    """Return what changes with the file, its permissions, and what a link to it names."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
