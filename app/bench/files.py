"""Finds image files by path, folder or glob, as a user names them."""

import glob
from collections.abc import Iterator
from pathlib import Path

from models.errors import TandemError
from models.image_files import images_below


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
