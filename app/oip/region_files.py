"""Opens, reads and writes files of POSIX shared memory, which others may change at any moment.

It uses ``pread`` and ``pwrite`` and never maps a file. Reading a mapping beyond the end of a
truncated file, or writing one when memory is full, raises SIGBUS and ends the process. A system
call returns an error instead (decision 0074).
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.errors import BadRegionError
from app.oip.tensors import shown

FOLDER = Path("/dev/shm")  # POSIX shared memory on Linux (shm_overview(7))
MAX_NAME_BYTES = 255  # NAME_MAX
STEP_BYTES = 2**30  # Linux transfers a little less than 2 GiB per call


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file: its descriptor, its identity, and its present size."""

    descriptor: int
    identity: tuple[int, int]
    size: int


def file_name(key: object) -> str:
    """Return the file name for a region's key; raise :class:`BadRegionError` for invalid keys."""
    if not isinstance(key, str):
        raise BadRegionError(f"key is {shown(key)}; it is the name of a file in {FOLDER}")
    name = key.removeprefix("/")  # shm_open(3) accepts a leading slash
    is_path = "/" in name or "\0" in name or not name.strip(".")
    try:
        is_long = len(name.encode()) > MAX_NAME_BYTES
    except UnicodeEncodeError:
        is_long = True
    if is_path or is_long:
        raise BadRegionError(
            f"key is {shown(key)}; it is the name of a file in {FOLDER}: up to {MAX_NAME_BYTES} "
            "bytes without slashes, and not dots alone"
        )
    return name


@contextmanager
def opened(folder: Path, name: str, *, is_writing: bool = False) -> Iterator[OpenFile]:
    """Open a regular file during the block, without following links and without blocking.

    Raises:
        BadRegionError: the file does not exist, is not regular, or may not be opened.

    """
    access = os.O_RDWR if is_writing else os.O_RDONLY
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
        descriptor = os.open(folder / name, access | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BadRegionError(
            f"shared memory {shown(name)} cannot be opened: {error.strerror}; it must be a regular "
            "file that the service's user may read and write, and be there until it is unregistered"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadRegionError(f"shared memory {shown(name)} is no regular file")
        yield OpenFile(descriptor, (status.st_dev, status.st_ino), status.st_size)
    finally:
        os.close(descriptor)


def read_at(file: OpenFile, place: int, num_bytes: int) -> bytes:
    """Return ``num_bytes`` bytes; raise :class:`BadRegionError` if the file ends before."""
    parts, left = [], num_bytes
    while left:
        part = os.pread(file.descriptor, min(left, STEP_BYTES), place + num_bytes - left)
        if not part:
            raise BadRegionError(
                f"shared memory ended after {num_bytes - left} of {num_bytes} bytes while it was "
                "read; leave its size as it is until the answer is there"
            )
        parts.append(part)
        left -= len(part)
    return b"".join(parts)  # a single part is not copied


def write_at(file: OpenFile, place: int, data: bytes) -> None:
    """Write all of ``data``; raise :class:`BadRegionError` if the system refuses, as when full."""
    left = memoryview(data)
    while len(left):
        try:
            written = os.pwrite(file.descriptor, left[:STEP_BYTES], place)
        except OSError as error:
            raise BadRegionError(
                f"shared memory took {len(data) - len(left)} of {len(data)} bytes: {error.strerror}"
            ) from error
        left, place = left[written:], place + written
