"""The user's own folders by the platform's rules; an account may have no home."""

import os
from collections.abc import Callable
from pathlib import Path

from models.errors import TandemError

APPLICATION = "tandem"


def with_home(path: str | Path) -> Path:
    """Return the path with ``~`` as the home folder, or as it is if there is none."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  # Path's raises


def user_folder(kind: Callable[[str], Path], *below: str) -> Path | None:
    """Return a folder of the user's; None if neither HOME, XDG nor passwd names a home.

    ``kind`` is a function of platformdirs, as ``user_cache_path``.
    """
    try:
        folder = kind(APPLICATION).joinpath(*below)
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # older releases return "~/.cache" literally


def needed_folder(kind: Callable[[str], Path], *below: str) -> Path:
    """Return a folder of the user's; raise :class:`TandemError` if there is no home."""
    if (folder := user_folder(kind, *below)) is None:
        raise TandemError("this account has no home folder; set HOME to one that can be written to")
    return folder
