"""Writes files so that a power cut can neither undo nor reorder the writes.

Writes, renames and removals are first made in memory, and may reach the disk in another order
(fsync(2), rename(2)). So a file's bytes are flushed before it is renamed to its final name, and the
folder is flushed before files that the rename replaced are removed.
"""

import errno
import os
from pathlib import Path

import yaml

from models.manifest import MANIFEST_NAME, Manifest


def flush(path: Path) -> None:
    """Wait until the disk has a file's bytes, or a folder's entries."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that flushes no folders (some networks')
            raise
    finally:
        os.close(opened)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest in one step, so that no reader or power cut sees a part of it.

    Files that it names must have been flushed to the disk before.
    """
    partial = folder / f"{MANIFEST_NAME}.partial"
    content = manifest.model_dump(mode="json", exclude_defaults=False, exclude_none=True)
    partial.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), "utf-8")
    flush(partial)
    partial.replace(folder / MANIFEST_NAME)
    flush(folder)
