"""Finds image files by their names, in a folder and all folders below it."""

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

SUFFIXES: tuple[str, ...] = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp")
if find_spec("pillow_heif"):  # with the extra heif
    SUFFIXES = (*SUFFIXES, ".heic", ".heif", ".avif")
_MACOS_FOLDER = "__MACOSX"  # in ZIP archives of macOS: metadata files with the pictures' names


def images_below(folder: Path) -> list[Path]:
    """Return every image file below ``folder``, sorted; follows links to folders."""
    paths: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        here = Path(place)
        folders[:] = [name for name in folders if not (is_hidden(name) or _is_loop(here / name))]
        paths += [here / name for name in names if is_image(here / name)]
    return sorted(paths)


def is_image(path: Path) -> bool:
    """Whether a path is a file with an image's suffix, and not hidden (as macOS's ``._*``)."""
    return path.suffix.lower() in SUFFIXES and not is_hidden(path.name) and path.is_file()


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is skipped when a whole folder is read."""
    return name.startswith(".") or name == _MACOS_FOLDER


def _is_loop(folder: Path) -> bool:
    """Whether a folder is a link to one of its own parents."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def first_not_utf8(names: Iterable[str]) -> bytes | None:
    """Return the first name that is not UTF-8, as old archives have them; None without one."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            return os.fsencode(name)
    return None
