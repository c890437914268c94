"""Finds a model set's earlier versions, which are complete sets in a folder inside the set's.

A fingerprint names a version (:meth:`models.manifest.Manifest.fingerprint`), and NAME@VERSION a
set in that version. Commands that make another version keep what was there
(:mod:`calibration.sets.history`).
"""

import re
from pathlib import Path

VERSIONS_NAME = ".versions"  # in the set's folder; contains a folder per earlier version
MAX_EARLIER = 5  # earlier versions per set; the oldest is removed
VERSION = re.compile(r"[0-9a-f]{12}")


def split_version(name: str) -> tuple[str, str | None]:
    """Return a set's name or path, and the version after its last ``@``, or None."""
    base, _, version = name.rpartition("@")
    return (base, version) if base and VERSION.fullmatch(version) else (name, None)


def earlier_folders(folder: Path) -> list[Path]:
    """Return the folders of a set's earlier versions, the newest first."""
    folders = [path for path in folder.glob(f"{VERSIONS_NAME}/*") if VERSION.fullmatch(path.name)]
    return sorted(folders, key=modified_ns, reverse=True)


def modified_ns(path: Path) -> int:
    """Return when a folder was last changed; 0 if another process has removed it."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
