"""Sets whose classes have names, and files on disk that are called so."""

from pathlib import Path
from typing import Any

from calibration.datasets import Dataset
from models.manifest import read_manifest
from models.model_set import ModelSet
from models.record import FileRecord
from tests.support.tiny_networks import LABELS, write_tiny_set

IDS = ("n01", "n02", "n03")


def with_names(
    folder: Path, labels: tuple[str, ...] = LABELS, ids: tuple[str, ...] | None = None
) -> ModelSet:
    """Return a tiny set whose classes have these names."""
    folder.mkdir()
    facts: dict[str, Any] = {"num_classes": len(labels)}
    for what, names in (("labels", labels), ("class_ids", ids)):
        if names is not None:
            (folder / f"{what}.names").write_text("\n".join(names), "utf-8")
            facts[what] = FileRecord.of(folder, f"{what}.names")
    write_tiny_set(folder, gains={"only": 4.0}, **facts)
    return ModelSet(folder, read_manifest(folder))


def touch(folder: Path, *paths: str) -> Path:
    """Make empty files; only their names are read here."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    return folder


def listed(folder: Path, text: str | bytes, name: str = "list.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def pairs(found: Dataset, below: Path) -> list[tuple[str, int]]:
    return [(str(i.path.relative_to(below)), i.class_index) for i in found.images]
