"""Finds image files by path, folder or glob."""

import glob
from collections.abc import Iterator
from pathlib import Path

from models.errors import TandemError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})


class NothingToClassifyError(TandemError):
    """No image among the given paths."""

    code = "nothing_to_classify"


def find_files(paths: list[str]) -> Iterator[Path]:
    """Yield each file once: as named, every image below a folder, or what a glob matches."""
    seen: set[Path] = set()
    for text in paths:
        path = Path(text)
        if path.is_dir():
            images = (p for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES)
            found = [p for p in images if not p.is_dir()]
            if not found:
                raise NothingToClassifyError(f"no JPEG, PNG or WebP in {path}; name another folder")
        elif path.exists():
            found = [path]
        else:
            # The text is the user's glob, relative or absolute: Path.glob takes no absolute one.
            matches = glob.glob(text, recursive=True)  # noqa: PTH207
            found = [Path(match) for match in sorted(matches) if not Path(match).is_dir()]
            if not found:
                raise NothingToClassifyError(f"no such file or folder: {text}")
        yield from (p for p in found if p not in seen and not seen.add(p))  # type: ignore[func-returns-value]
