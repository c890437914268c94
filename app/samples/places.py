"""The places that samples are written to: a folder of bounded size, or an object store."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from app.errors import ConfigError
from app.samples.sample import Sample
from models.extras import installed_version, pip_install
from models.result_files import write_whole
from models.store_files import CLIENTS, EXTRAS, said, smart_open_file
from models.stores import is_url

PARTS = 128  # A Gateway lists the folder again after it wrote this part of the limit.
OWN_FILE = re.compile(r"\.?(?P<stem>\d{8}T\d{12}-[0-9a-f]{16})\.[a-z0-9.]+")


class SamplePlace(Protocol):
    """A folder or store that samples are written to."""

    def write(self, sample: Sample) -> bool:
        """Write a sample; return False if there is no room for it."""


class SampleFolder:
    """A folder that holds at most ``max_bytes`` of samples, those of other processes included.

    Files that are no samples are neither counted nor removed.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._left = 0  # bytes that may be written before the folder is listed again

    def write(self, sample: Sample) -> bool:
        """Write a sample, and remove the oldest ones to make room for it.

        Return False if it is larger than the limit.

        Raises:
            OSError: the folder cannot be written, or the disk is full.

        """
        if sample.num_bytes > self._max_bytes:
            return False
        left, self._left = self._left, 0  # so that the folder is listed again after a failure
        if sample.num_bytes > left:
            left = self._make_room(max(sample.num_bytes, self._max_bytes // PARTS))
        for name, content in sample.files:
            write_whole(self._folder / name, content, mode=0o600)  # private photos
        self._left = left - sample.num_bytes
        return True

    def _make_room(self, room: int) -> int:
        """Remove the oldest samples until ``room`` bytes are free; return ``room``."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # private photos
        sizes: dict[str, int] = {}
        files: dict[str, list[Path]] = {}
        for path in self._folder.iterdir():
            if own := OWN_FILE.fullmatch(path.name):
                files.setdefault(own["stem"], []).append(path)
                sizes[own["stem"]] = sizes.get(own["stem"], 0) + _num_bytes(path)
        total = sum(sizes.values())
        for stem in sorted(files):
            if total + room <= self._max_bytes:
                break
            for path in sorted(files[stem], key=lambda path: path.suffix != ".json"):
                path.unlink(missing_ok=True)  # another Gateway may have removed it
            total -= sizes[stem]
        return room


class SampleStore:
    """An object store, by URL; this process writes at most ``max_bytes`` a day (UTC) to it.

    Nothing is removed from the store.
    """

    def __init__(
        self,
        url: str,
        max_bytes: int,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._url, self._max_bytes, self._now = url.rstrip("/"), max_bytes, now
        self._day, self._num_bytes = "", 0

    def write(self, sample: Sample) -> bool:
        """Write a sample to the day's folder; return False if the day's limit is reached.

        Raises:
            StoreError: the store cannot be written.

        """
        day = f"{self._now():%Y%m%d}"
        if day != self._day:
            self._day, self._num_bytes = day, 0
        if self._num_bytes + sample.num_bytes > self._max_bytes:
            return False
        for name, content in sample.files:
            target = f"{self._url}/{day}/{name}"
            with said(f"cannot write {target}"), smart_open_file(target, "wb") as opened:
                opened.write(content)
        self._num_bytes += sample.num_bytes
        return True


def place_of(name: str, max_bytes: int) -> SamplePlace:
    """Return the place with that name: the URL of a store, or a folder."""
    return SampleStore(name, max_bytes) if is_url(name) else SampleFolder(Path(name), max_bytes)


def check_sample_store(place: str | None) -> None:
    """Raise :class:`ConfigError` if ``place`` is a store whose package is missing."""
    scheme = (place or "").partition("://")[0]
    if scheme in EXTRAS and installed_version(CLIENTS[scheme]) is None:
        needed = pip_install(EXTRAS[scheme])
        raise ConfigError(f"sample_dir is {place}, and its client is not installed: {needed}")


def _num_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
