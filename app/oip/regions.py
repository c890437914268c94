"""Shared-memory regions that clients registered: Triton's system shared memory extension.

All Gateways of a run share a folder of entries, so each knows every region. The folder is removed
after the run.
"""

import hashlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from app.errors import BadRegionError, RegionExistsError, UnknownRegionError
from app.oip.documents import RegionStatus
from app.oip.region_files import FOLDER, OpenFile, file_name, opened, read_at, write_at
from app.oip.tensors import RegionSlice, shown

MAX_REGIONS = 256  # of all clients
MAX_NAME = 256  # characters
MAX_OFFSET = 2**63 - 1  # off_t


RegionEntry = tuple[RegionStatus, tuple[int, int]]  # a region and its file's identity


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
        return [self._find(name)[0]] if name else self._all()

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

    def _all(self) -> list[RegionStatus]:
        regions = []
        for place in self._places():
            with suppress(FileNotFoundError):  # unregistered meanwhile
                regions.append(_parsed(place.read_bytes())[0])
        return sorted(regions, key=lambda region: region.name)

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
