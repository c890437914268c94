"""Folders of object stores through Arrow's filesystems: opens a URL and lists its images."""

from pathlib import Path, PurePosixPath
from typing import Any

from models.extras import needs_extra
from models.image_files import SUFFIXES, is_hidden
from models.store_files import StoreError

SEPARATOR = "://"


def is_store(name: str) -> bool:
    """Whether a name is a store's URL rather than a path."""
    return SEPARATOR in name


def opened_store(url: str) -> tuple[Any, str]:
    """Return the ``pyarrow.fs.FileSystem`` of a URL, and the path in it.

    Raises:
        MissingExtraError: pyarrow is not installed.
        StoreError: there is no filesystem for URLs of this kind.

    """
    with needs_extra("parquet", f"classify --offline with {url}"):
        import pyarrow.fs
    scheme, _, path = url.partition(SEPARATOR)
    host = path.partition("/")[0]  # a path may contain # and %, which a URL may not
    try:
        filesystem, _ = pyarrow.fs.FileSystem.from_uri(f"{scheme}{SEPARATOR}{host}")
    except (ValueError, OSError) as error:
        raise StoreError(
            f"cannot open {url}: {error}; write s3://BUCKET/FOLDER or gs://"
        ) from error
    return filesystem, path.rstrip("/")


def read_image(name: str) -> bytes:
    """Return the content of a file or a store's object; raise :class:`OSError` if unreadable."""
    if not is_store(name):
        return Path(name).read_bytes()
    filesystem, path = opened_store(name)
    with filesystem.open_input_stream(path) as stream:
        content: bytes = stream.read()
    return content


def images_at(url: str) -> list[str]:
    """Return the URLs of all images below a store's folder, sorted; for an object its own URL.

    Raises:
        StoreError: there are no images, or the store cannot be listed.

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
    names = [info.path for info in infos if info.is_file and _is_image(info.path, below)]
    if not names:
        raise StoreError(f"no JPEG, PNG or WebP in {url}; name another folder")
    return [f"{scheme}{SEPARATOR}{name}" for name in sorted(names)]


def _is_image(path: str, below: int) -> bool:
    parts = PurePosixPath(path).parts[below:]
    return path.lower().endswith(SUFFIXES) and not any(map(is_hidden, parts))
