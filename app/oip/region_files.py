"""Opens, reads and writes files of POSIX shared memory, which others may change at any moment.

With ``pread`` and ``pwrite``, never mapped: reading a mapping beyond the end of a file that was cut
short meanwhile, or writing one when the memory is full, is SIGBUS and the end of the process; of a
system call it is an error (app/DECISIONS.md).
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.errors import BadRegionError
from app.oip.tensors import shown

FOLDER = Path("/dev/shm")  # where Linux has POSIX shared memory (shm_overview(7))
MAX_NAME_BYTES = 255  # NAME_MAX
STEP_BYTES = 2**30  # Linux reads and writes a little less than 2 GiB at a time


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file: its descriptor, what tells it from a later one of its name, its size now."""

    descriptor: int
    identity: tuple[int, int]
    size: int


def file_name(key: object) -> str:
    """Return the name of the file that a key means, or raise :class:`BadRegionError`."""
    if not isinstance(key, str):
        raise BadRegionError(f"key is {shown(key)}; it is the name of a file in {FOLDER}")
    name = key.removeprefix("/")  # shm_open(3) takes a slash before it
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
    """Open a regular file while the block runs; links are not followed, and nothing is waited for.

    Raises:
        BadRegionError: it is not there, is none, or may not be opened.

    """
    access = os.O_RDWR if is_writing else os.O_RDONLY
    try:
        # A pipe would wait for its other end without O_NONBLOCK.
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
    """Return so many bytes; raise :class:`BadRegionError` if the file ends before."""
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
    return parts[0] if len(parts) == 1 else b"".join(parts)


def write_at(file: OpenFile, place: int, data: bytes) -> None:
    """Write all of ``data``; :class:`BadRegionError`: the system did not take it: it is full."""
    left = memoryview(data)
    while len(left):
        try:
            written = os.pwrite(file.descriptor, left[:STEP_BYTES], place)
        except OSError as error:
            raise BadRegionError(
                f"shared memory took {len(data) - len(left)} of {len(data)} bytes: {error.strerror}"
            ) from error
        left, place = left[written:], place + written
