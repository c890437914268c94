"""Regions of shared memory that clients registered: Triton's system shared memory extension.

All Gateways of a run share a folder of entries, so each knows every region. The folder is removed
after the run. Only callers that are known to be on this machine may use regions.

Others may change the files at any moment. So they are read and written by ``pread`` and ``pwrite``,
never mapped. Reading a mapping beyond the end of a truncated file, or writing one when memory is
full, raises SIGBUS and ends the process. A system call returns an error instead (decision 0074).
"""

import hashlib
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from app.environment import REGIONS_FOLDER, environment_value
from app.errors import (
    BadRegionError,
    ConfigError,
    NotLocalError,
    RegionExistsError,
    UnknownRegionError,
)
from app.oip.models import RegionStatus
from app.oip.tensors import RegionSlice, shown

MAX_REGIONS = 256  # of all clients
MAX_NAME = 256  # characters
MAX_OFFSET = 2**63 - 1  # off_t
RegionEntry = tuple[RegionStatus, tuple[int, int]]  # a region and its file's identity
FOLDER = Path("/dev/shm")  # POSIX shared memory on Linux (shm_overview(7))
MAX_NAME_BYTES = 255  # NAME_MAX
STEP_BYTES = 2**30  # Linux transfers a little less than 2 GiB per call
OFF = (
    "shared memory is off here; send the data itself, or start the service with shared_memory: "
    "unproxied"
)
NO_CUDA = (
    "CUDA shared memory is not supported: the networks run on CPUs; send the data itself, or "
    "register system shared memory"
)


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file: its descriptor, its identity, and its present size."""

    descriptor: int
    identity: tuple[int, int]
    size: int


class Regions:
    """Registers regions, and reads and writes them.

    An entry is a file that is created as a whole, and only if no entry has its name.
    """

    def __init__(self, entries: Path, memory: Path = FOLDER) -> None:
        """Use the folder ``entries``, and shared memory files in the folder ``memory``."""
        self._entries, self._memory = entries, memory

    def register(self, name: object, key: object, offset: object, byte_size: object) -> None:
        """Register the bytes of the file ``key`` from ``offset`` on as region ``name``.

        Raises:
            BadRegionError: the file does not exist or is too short.
            RegionExistsError: the name is taken.
        """
        name, file = _checked_name(name), file_name(key)
        offset, byte_size = _number("offset", offset, 0), _number("byte_size", byte_size, 1)
        with opened(self._memory, file) as there:
            _check_size(there, shown(name), offset + byte_size)
            identity = there.identity
        self._add(RegionStatus(name, str(key), offset, byte_size), identity)

    def unregister(self, name: str = "") -> None:
        """Remove a region, or all with an empty name; unknown regions are no error."""
        for place in [self._place(name)] if name else self._places():
            place.unlink(missing_ok=True)

    def status(self, name: str = "") -> list[RegionStatus]:
        """Describe a region, or all with an empty name; raises :class:`UnknownRegionError`."""
        if name:
            return [self._find(name)[0]]
        regions = []
        for place in self._places():
            with suppress(FileNotFoundError):  # unregistered meanwhile
                regions.append(_parsed(place.read_bytes())[0])
        return sorted(regions, key=lambda region: region.name)

    def read(self, part: RegionSlice) -> bytes:
        """Return the bytes of ``part``; may run on any thread; raises as :meth:`write` does."""
        with self._opened(part) as (file, place):
            return read_at(file, place, part.byte_size)

    def check(self, part: RegionSlice) -> None:
        """Raise if :meth:`write` would raise now."""
        with self._opened(part, is_writing=True):
            pass

    def write(self, part: RegionSlice, data: bytes) -> RegionSlice:
        """Write ``data`` at the beginning of ``part``; return the part that it fills.

        Raises:
            UnknownRegionError, BadRegionError: the part does not exist, has changed, or is too
                small.
        """
        if len(data) > part.byte_size:
            raise BadRegionError(
                f"the output has {len(data)} bytes, and {part.byte_size} are given to it in region "
                f"{shown(part.region)}; give it more"
            )
        with self._opened(part, is_writing=True) as (file, place):
            write_at(file, place, data)
        return RegionSlice(part.region, len(data), part.offset)

    @contextmanager
    def _opened(
        self, part: RegionSlice, *, is_writing: bool = False
    ) -> Iterator[tuple[OpenFile, int]]:
        """Open a region's file; check that it is the registered one and contains the part."""
        (region, identity), where = self._find(part.region), f"region {shown(part.region)}"
        if not 0 <= part.offset < part.offset + part.byte_size <= region.byte_size:
            raise BadRegionError(
                f"{where} has {region.byte_size} bytes, and {part.byte_size} from {part.offset} on "
                "are asked for"
            )
        with opened(self._memory, file_name(region.key), is_writing=is_writing) as file:
            if file.identity != identity:
                raise BadRegionError(f"{where}: its file was replaced; register it again")
            place = region.offset + part.offset
            _check_size(file, where, place + part.byte_size)
            yield file, place

    def _find(self, name: str) -> RegionEntry:
        with suppress(FileNotFoundError):
            return _parsed(self._place(_checked_name(name)).read_bytes())
        raise UnknownRegionError(f"region {shown(name)} is not registered; register it first")

    def _add(self, region: RegionStatus, identity: tuple[int, int]) -> None:
        if len(self._places()) >= MAX_REGIONS:
            raise BadRegionError(
                f"{MAX_REGIONS} regions are registered, the limit; unregister those of no use"
            )
        unfinished = self._entries / f".{uuid.uuid4().hex}"
        try:
            unfinished.write_bytes(orjson.dumps((region, identity)))
            self._place(region.name).hardlink_to(unfinished)
        except FileExistsError as error:
            raise RegionExistsError(
                f"region {shown(region.name)} is registered already; unregister it first"
            ) from error
        except OSError as error:
            raise BadRegionError(
                f"region {shown(region.name)} cannot be kept in {self._entries}: {error.strerror}"
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)

    def _places(self) -> list[Path]:
        return [place for place in self._entries.iterdir() if not place.name.startswith(".")]

    def _place(self, name: str) -> Path:
        """Return the path of a region's entry; names may have any characters."""
        return self._entries / hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()


def _parsed(text: bytes) -> RegionEntry:
    region, identity = orjson.loads(text)
    return RegionStatus(**region), tuple(identity)


def _checked_name(name: object) -> str:
    if isinstance(name, str) and 0 < len(name) <= MAX_NAME:
        with suppress(UnicodeEncodeError):
            name.encode()
            return name
    raise BadRegionError(
        f"a region's name is {shown(name)}; it is a text of 1 to {MAX_NAME} characters"
    )


def _number(what: str, value: Any, least: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_OFFSET:
        return value
    raise BadRegionError(
        f"{what} is {shown(value)}; it is a whole number of bytes from {least} to {MAX_OFFSET}"
    )


def _check_size(file: OpenFile, where: str, needed: int) -> None:
    if needed > file.size:
        raise BadRegionError(
            f"{where}: its shared memory has {file.size} bytes, and it needs {needed}; make it as "
            "large before it is registered, and leave it so"
        )


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

    Raises :class:`BadRegionError` if the file does not exist, is not regular, or may not be opened.
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
        # Permissions do not stop root, who would open another user's file for whoever names it.
        needed = stat.S_IROTH | (stat.S_IWOTH if is_writing else 0)
        if os.geteuid() == 0 != status.st_uid and status.st_mode & needed != needed:
            raise BadRegionError(
                f"shared memory {shown(name)} is private to another user (mode "
                f"{stat.S_IMODE(status.st_mode):03o}); chmod 666, or run the service as that user"
            )
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


def regions_of(*, is_on: bool) -> Regions | None:
    """Return a Gateway's regions; None if shared memory is off.

    Raises :class:`ConfigError` if shared memory is on, but callers may be on other machines.
    """
    if not is_on:
        return None
    if (folder := environment_value(REGIONS_FOLDER)) is None:
        raise ConfigError(
            "shared_memory is for tandem serve, which knows that it listens on loopback "
            "alone; start the service with it, or leave the setting out"
        )
    return Regions(Path(folder))


def for_caller(regions: Regions | None, *, is_local: bool) -> Regions:
    """Return the regions, for a caller on this machine.

    Raises:
        BadRegionError: shared memory is off.
        NotLocalError: the caller is not known to be on this machine.
    """
    if regions is None:
        raise BadRegionError(OFF)
    if not is_local:
        raise NotLocalError(
            "shared memory is for programs on the service's own machine that call it directly; "
            "send the data itself"
        )
    return regions
