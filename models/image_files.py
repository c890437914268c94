"""Finds image files by path, folder or glob."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from models.errors import TandemError

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp")
_MACOS_FOLDER = "__MACOSX"  # of its ZIP archives: the Finder's notes, under the pictures' names


class NothingToClassifyError(TandemError):
    """No image among the given paths."""

    code = "nothing_to_classify"


def find_files(paths: list[str]) -> Iterator[Path]:
    """Yield each file once: as named, every image below a folder, or what a glob matches."""
    seen: set[Path] = set()
    for text in paths:
        path = Path(text)
        if path.is_dir():
            files = images_below(path)
            if not files:
                raise NothingToClassifyError(f"no JPEG, PNG or WebP in {path}; name another folder")
        elif path.exists():
            files = [path]
        else:
            # The text is the user's glob, relative or absolute: Path.glob takes no absolute one.
            matches = glob.glob(text, recursive=True)  # noqa: PTH207
            files = [Path(match) for match in sorted(matches) if not Path(match).is_dir()]
            if not files:
                raise NothingToClassifyError(f"no such file or folder: {text}")
        yield from (p for p in files if p not in seen and not seen.add(p))  # type: ignore[func-returns-value]


def images_below(folder: Path) -> list[Path]:
    """Return every image file below ``folder``, sorted; folders that are links are followed."""
    paths: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        here = Path(place)
        folders[:] = [name for name in folders if not (is_hidden(name) or _is_loop(here / name))]
        paths += [here / name for name in names if is_image(here / name)]
    return sorted(paths)


def is_image(path: Path) -> bool:
    """Whether it is a file that is named as an image, and not hidden (as macOS's ``._*`` are)."""
    return path.suffix.lower() in SUFFIXES and not is_hidden(path.name) and path.is_file()


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is left out where a whole folder is read."""
    return name.startswith(".") or name == _MACOS_FOLDER


def _is_loop(folder: Path) -> bool:
    """Whether it is a link to a folder that it lies in."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())
