"""Reads an ImageFolder one image at a time, with the decoder that serving uses."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from models.errors import ImageError, ModelSetError
from models.image import ImageRule, read_image
from models.image_files import SUFFIXES
from models.runtime import Pixels


@dataclass(frozen=True)
class LabelledFile:
    """One image of an ImageFolder (``<folder>/<class>/<file>``)."""

    path: Path
    class_name: str


def list_folder(folder: Path) -> list[LabelledFile]:
    """Return every image of an ImageFolder, sorted by path; raise if there is none."""
    paths = sorted(p for p in folder.glob("*/*") if p.suffix.lower() in SUFFIXES)
    if not paths:
        raise ModelSetError(f"no images in {folder}: expected {folder}/<class>/<name>.jpg")
    return [LabelledFile(path, path.parent.name) for path in paths]


def class_names(files: list[LabelledFile]) -> tuple[str, ...]:
    """Return the classes, sorted: their order is the order of the network's outputs."""
    return tuple(sorted({file.class_name for file in files}))


def read_pixels(
    files: Iterable[LabelledFile], rule: ImageRule, unreadable: list[str]
) -> Iterator[tuple[LabelledFile, Pixels]]:
    """Yield (file, uint8 (H, W, 3) BGR) one by one; the others are added to ``unreadable``."""
    for file in files:
        try:
            yield file, read_image(file.path.read_bytes(), rule)
        except (ImageError, OSError) as error:
            unreadable.append(f"{file.path}: {error}")
