"""A copy of the installed Ray in which names have other names, everywhere: as another version may.

Ray itself works as before; who looks one of the names up does not find it. The files are hard links
but for those that have one of the names.
"""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import ray

SUFFIX = "_of_another_version"


def renamed_ray(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Make the copy in ``folder``; return the environment with which Python imports it."""
    installed = Path(ray.__file__).parent
    copy = folder / "ray"
    shutil.copytree(installed, copy, copy_function=_linked, symlinks=True)
    word = re.compile(rf"\b({'|'.join(names)})\b")
    for path in copy.rglob("*.py"):
        text = path.read_text("utf-8")
        renamed = word.sub(rf"\1{SUFFIX}", text)
        if renamed != text:
            path.unlink()  # the installed one has the same inode
            path.write_text(renamed, "utf-8")
    return {"PYTHONPATH": str(folder)}


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
