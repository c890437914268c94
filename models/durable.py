"""Flushes files and folders to the disk, so that a power cut cannot undo or reorder a change.

A write, a rename or a removal is first made in memory, and the disk may see them in another order
(fsync(2), rename(2)). So a file's bytes are flushed before a rename gives it the name it is found
by, and the folder before anything that the rename replaced is removed.
"""

import errno
import os
from pathlib import Path


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
