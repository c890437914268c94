"""Creates a model set of existing classifiers (ONNX or OpenVINO IR)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from calibration.sets.fold import Normalisation
from calibration.sets.import_network import Imported, Outputs, import_network
from calibration.sets.staging import Staging
from calibration.sets.transaction import create
from models.errors import ModelSetError
from models.image_record import ImageRecord
from models.manifest import Manifest, MemberRecord, Network, read_manifest
from models.model_set import PARTIAL_SUFFIX, ModelSet, read_lines
from models.record import FileRecord, Precision, sha256_of

NOT_YET = FileRecord(path="not-written-yet", sha256="0" * 64)


@dataclass(frozen=True)
class NewSet:
    """What a set is made of; a member may have two files, one float and one INT8."""

    name: str
    members: Sequence[tuple[str, Path]]
    labels: Path
    class_ids: Path | None = None
    input_size: int | None = None
    resize_shorter: int | None = None  # None: input size * 8/7, as 256 is to 224
    normalisation: Normalisation = field(default_factory=Normalisation)
    outputs: Outputs = "auto"
    weights: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    description: str = ""
    hint: str = ""
    max_drop: float = 0.005


def add_set(new: NewSet, into: Path, *, is_replaced: bool = False) -> ModelSet:
    """Make the set as folder ``into/NAME``; it appears whole or not at all.

    Raises:
        ModelSetError: a file that is no such classifier, or sizes, classes and labels that differ.
        ValidationError: a name or number that no manifest may have.

    """
    labels = read_lines(new.labels)
    strangers = (set(new.weights) | set(new.sources)) - {name for name, _ in new.members}
    if strangers:
        raise ModelSetError(f"no --member {sorted(strangers)[0]!r} that a weight or source is for")
    imported = [
        (name, path, import_network(path, new.input_size, new.normalisation, new.outputs))
        for name, path in new.members
    ]
    _check_alike(imported, len(labels), new.labels)
    planned = _planned(new, imported, len(labels))
    folder = into / planned.name
    with create(folder, is_replaced=is_replaced) as staging:
        update = {
            "labels": staging.text("labels.txt", "".join(f"{label}\n" for label in labels)),
            "class_ids": _ids(new, len(labels), staging),
            "members": _members(planned, imported, staging),
        }
        finish(staging, planned.model_copy(update=update))
    return ModelSet(folder, read_manifest(folder))


def _planned(
    new: NewSet, imported: Sequence[tuple[str, Path, Imported]], num_classes: int
) -> Manifest:
    """Return the manifest but for its files: what is wrong with it is said before any is there."""
    if new.name.endswith(PARTIAL_SUFFIX):
        raise ModelSetError(f"{new.name!r}: sets that end in {PARTIAL_SUFFIX} are half-made ones")
    size = imported[0][2].input_size
    paths = {name: path for name, path, _ in reversed(imported)}  # the first one of each
    return Manifest(
        name=new.name,
        description=new.description or f"{num_classes} classes",
        image=ImageRecord(
            input_size=size, resize_shorter=new.resize_shorter or round(size * 8 / 7)
        ),
        num_classes=num_classes,
        labels=NOT_YET,
        members=tuple(
            MemberRecord(
                name=name,
                weight=new.weights.get(name, 1.0),
                source=new.sources.get(name)
                or f"{paths[name].name}, sha256 {sha256_of(paths[name])}",
                networks={},
            )
            for name in dict.fromkeys(name for name, _, _ in imported)
        ),
        max_drop=new.max_drop,
        hint=new.hint,
    )


def finish(staging: Staging, manifest: Manifest) -> None:
    """Record the golden answers and move everything in."""
    staging.move_in(manifest.model_copy(update={"golden": staging.golden(manifest)}))


def _check_alike(
    imported: Sequence[tuple[str, Path, Imported]], num_labels: int, labels: Path
) -> None:
    facts = [
        f"{name} ({path}): {i.input_size} px, {i.num_classes} classes" for name, path, i in imported
    ]
    found = {(i.input_size, i.num_classes) for _, _, i in imported}
    if len(found) > 1 or next(iter(found))[1] != num_labels:
        raise ModelSetError(
            f"these do not make one set: {'; '.join(facts)}; {labels}: {num_labels} labels. Size "
            "and number of classes must be the same"
        )


def _ids(new: NewSet, num_classes: int, staging: Staging) -> FileRecord | None:
    if new.class_ids is None:
        return None
    ids = read_lines(new.class_ids)
    if not len(ids) == len(set(ids)) == num_classes:
        raise ModelSetError(
            f"{new.class_ids} has {len(ids)} class ids, {len(set(ids))} different ones, for "
            f"{num_classes} classes"
        )
    return staging.text("class_ids.txt", "".join(f"{name}\n" for name in ids))


def _members(
    planned: Manifest, imported: Sequence[tuple[str, Path, Imported]], staging: Staging
) -> tuple[MemberRecord, ...]:
    networks: dict[str, dict[Precision, Network]] = {}
    for name, _, one in imported:
        by = networks.setdefault(name, {})
        if one.precision in by:
            raise ModelSetError(
                f"--member {name} is given twice as {one.precision}; a member has one float and "
                "one INT8 network"
            )
        stem = f"{name}-{one.precision.lower()}"
        by[one.precision] = staging.network(one.model, stem, is_float=one.precision == "FP16")
    return tuple(
        record.model_copy(update={"networks": networks[record.name]}) for record in planned.members
    )
