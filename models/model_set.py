"""Finding, loading and verifying model sets on disk."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from models.errors import ModelSetError
from models.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    Precision,
    read_manifest,
    sha256_of,
)

BUNDLED_DIR = Path(__file__).parent  # models/<set>/ beside this code


@dataclass(frozen=True)
class ModelSet:
    """A folder and what its manifest says; files are hashed when they are used."""

    folder: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.manifest.name

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Return one label per class, in the networks' order."""
        path = self.verified(self.manifest.labels)
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ModelSetError(f"{path} is not UTF-8: {error}; save it as UTF-8") from error
        labels = tuple(line.strip() for line in text.splitlines() if line.strip())
        if len(labels) != self.manifest.num_classes:
            raise ModelSetError(
                f"{path} has {len(labels)} labels, "
                f"the manifest says num_classes: {self.manifest.num_classes}"
            )
        return labels

    def network_path(self, member: str, precision: Precision = "INT8") -> Path:
        """Return the verified IR (.xml; its .bin lies beside it) of one member."""
        for record in self.manifest.members:
            if record.name == member:
                network = record.network(precision)
                self.verified(network.bin)
                return self.verified(network.xml)
        there = ", ".join(record.name for record in self.manifest.members)
        raise ModelSetError(f"model set {self.name} has no member {member!r}; it has: {there}")

    def verified(self, record: FileRecord) -> Path:
        """Return the file's path after comparing its hash with the manifest's."""
        if problem := self.problem_with(record):
            raise ModelSetError(problem)
        return self.folder / record.path

    def problem_with(self, record: FileRecord) -> str | None:
        """Say what is wrong with the file, if anything is."""
        path = self.folder / record.path
        if not path.is_file():
            return f"{path} is missing; restore the model set's folder or fetch it again"
        if (found := sha256_of(path)) != record.sha256:
            return (
                f"{path} was altered: its sha256 is {found[:12]}…, the manifest says "
                f"{record.sha256[:12]}…; restore the file or make the set again"
            )
        return None

    def problems(self) -> list[str]:
        """Check every file of the set; an empty list means that it is as its manifest says."""
        found = [p for record in self.manifest.files if (p := self.problem_with(record))]
        if not found:
            try:
                _ = self.labels
            except ModelSetError as error:
                found.append(error.message)
        return found


def load_model_set(name_or_path: str, search: tuple[Path, ...] = (BUNDLED_DIR,)) -> ModelSet:
    """Load a set by name (the first in ``search`` that has it) or by the path of its folder."""
    as_path = Path(name_or_path).expanduser()
    candidates = [directory / name_or_path for directory in search]
    if "/" in name_or_path or as_path.is_absolute():
        candidates = [as_path]
    for folder in candidates:
        if (folder / MANIFEST_NAME).is_file():
            return ModelSet(folder, read_manifest(folder))
    there = ", ".join(sorted(s.name for s in list_folders(search))) or "none"
    places = ", ".join(map(str, candidates))
    raise ModelSetError(
        f"no model set {name_or_path!r}: no {MANIFEST_NAME} in {places}; sets found: {there}"
    )


def list_folders(search: tuple[Path, ...] = (BUNDLED_DIR,)) -> list[Path]:
    """Return the folders under ``search`` that hold a manifest, sorted by name."""
    return sorted(path.parent for place in search for path in place.glob(f"*/{MANIFEST_NAME}"))
