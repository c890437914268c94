"""Finds image files by their names, below a folder or an object store's URL."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from models.image_formats import HAS_HEIF, KINDS
from models.machine import needs_extra
from models.stores import StoreError

SUFFIXES: tuple[str, ...] = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp")
if HAS_HEIF:
    SUFFIXES = (*SUFFIXES, ".heic", ".heif", ".avif")
SEPARATOR = "://"  # of a URL
_MACOS_FOLDER = "__MACOSX"  # in ZIP archives of macOS: metadata files with the pictures' names


def images_below(folder: Path) -> list[Path]:
    """Return every image file below ``folder``, sorted; follows links to folders."""
    paths: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        here = Path(place)
        seen = [here / name for name in folders if not is_hidden(name)]
        loops = [p for p in seen if p.is_symlink() and here.resolve().is_relative_to(p.resolve())]
        folders[:] = [path.name for path in seen if path not in loops]
        paths += [here / name for name in names if is_image(here / name)]
    return sorted(paths)


def is_image(path: Path) -> bool:
    """Whether a path is a file with an image's suffix, and not hidden (as macOS's ``._*``)."""
    return path.suffix.lower() in SUFFIXES and not is_hidden(path.name) and path.is_file()


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is skipped when a whole folder is read."""
    return name.startswith(".") or name == _MACOS_FOLDER


def first_not_utf8(names: Iterable[str]) -> bytes | None:
    """Return the first name that is not UTF-8, as old archives have them; None without one."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            return os.fsencode(name)
    return None


def is_store(name: str) -> bool:
    """Whether a name is a store's URL rather than a path."""
    return SEPARATOR in name


def opened_store(url: str) -> tuple[Any, str]:
    """Return the ``pyarrow.fs.FileSystem`` of a store's URL, and the path in it.

    Raises:
        MissingExtraError: pyarrow is not installed.
        StoreError: there is no filesystem for URLs of this kind.
    """
    with needs_extra("parquet", f"classify-offline with {url}"):
        import pyarrow.fs
    scheme, _, path = url.partition(SEPARATOR)
    host = path.partition("/")[0]  # a path may contain # and %, which a URL may not
    try:
        filesystem, _ = pyarrow.fs.FileSystem.from_uri(f"{scheme}{SEPARATOR}{host}")
    except (ValueError, OSError) as error:
        problem = f"cannot open {url}: {error}; write s3://BUCKET/FOLDER or gs://"
        raise StoreError(problem) from error
    return filesystem, path.rstrip("/")


def read_image(name: str) -> bytes:
    """Return the content of a file or a store's object; raise :class:`OSError` if unreadable."""
    if not is_store(name):
        return Path(name).read_bytes()
    filesystem, path = opened_store(name)
    with filesystem.open_input_stream(path) as stream:
        content: bytes = stream.read()
    return content


def file_stamps(names: Sequence[str]) -> list[tuple[int, int] | None]:
    """Return the bytes and the time of change (ns) of files and objects; None of an absent one."""
    stamps: dict[str, tuple[int, int] | None] = {}
    stores: dict[str, list[str]] = {}
    for name in names:
        if is_store(name):
            stores.setdefault("/".join(name.split("/")[:3]), []).append(name)
            continue
        try:
            status = Path(name).stat()
            stamps[name] = status.st_size, status.st_mtime_ns
        except OSError:
            stamps[name] = None
    for host, urls in stores.items():
        filesystem, _ = opened_store(host)
        infos = filesystem.get_file_info([url.partition(SEPARATOR)[2] for url in urls])
        for url, info in zip(urls, infos, strict=True):
            stamps[url] = (info.size, info.mtime_ns or 0) if info.is_file else None
    return [stamps[name] for name in names]


def images_at(url: str) -> list[str]:
    """Return the URLs of all images below a store's folder, sorted; for an object its own URL.

    Raises :class:`StoreError` if there are no images, or the store cannot be listed.
    """
    import pyarrow.fs

    filesystem, path = opened_store(url)
    try:
        (place,) = filesystem.get_file_info([path])
        if place.is_file:
            return [url]
        infos = filesystem.get_file_info(pyarrow.fs.FileSelector(path, recursive=True))
    except OSError as error:
        raise StoreError(f"cannot list {url}: {error}") from error
    below = len(PurePosixPath(path).parts)
    scheme = url.partition(SEPARATOR)[0]
    names = [
        info.path
        for info in infos
        if info.is_file
        and info.path.lower().endswith(SUFFIXES)
        and not any(map(is_hidden, PurePosixPath(info.path).parts[below:]))
    ]
    if not names:
        raise StoreError(f"no {KINDS} in {url}; name another folder")
    return [f"{scheme}{SEPARATOR}{name}" for name in sorted(names)]
