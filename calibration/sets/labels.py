"""Reads the labels and class ids of a set from files, and gives an existing set other ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from calibration.label_files import ClassNames, read_class_names
from calibration.sets.transaction import Staging, change
from models.errors import ModelSetError
from models.manifest import Manifest, read_manifest
from models.model_set import ModelSet
from models.record import FileRecord

Say = Callable[[str, str, str | None], None]  # takes a file or member, facts and possible problem
MADE_BY = "tandem models labels"
# What was measured by the classes' order.
OF_ORDER = {"sure": None, "answer_set": None, "trust": (), "fast_plan": None}


@dataclass(frozen=True)
class SetClasses:
    """The labels of a set, and its class ids, in the networks' order."""

    labels: Sequence[str]
    ids: Sequence[str] | None

    @classmethod
    def read(cls, labels: Path, class_ids: Path | None, say: Say) -> "SetClasses":
        """Read both files; ids may stand in that of the labels.

        Raises :class:`ModelSetError` if a file cannot be read, or their numbers of classes differ.
        """
        names = read_names(labels, say)
        return cls(names.names, names.ids).with_ids(class_ids, labels, say)

    def with_ids(self, class_ids: Path | None, labels: Path | str, say: Say) -> "SetClasses":
        """Return these labels with the ids of a file, if there is one; ``labels`` names them."""
        ids = self.ids
        if class_ids is not None:
            own = read_names(class_ids, say)
            ids = own.ids or own.names
        if ids is not None and not len(ids) == len(set(ids)) == len(self.labels):
            raise ModelSetError(
                f"{class_ids or labels} has {len(ids)} class ids, {len(set(ids))} different ones, "
                f"for {len(self.labels)} classes"
            )
        return SetClasses(self.labels, ids)

    def written(self, staging: Staging) -> dict[str, FileRecord]:
        """Write the files, and return the manifest's fields."""
        files = {"labels": staging.text("labels.txt", _lines(self.labels))}
        if self.ids is not None:
            files["class_ids"] = staging.text("class_ids.txt", _lines(self.ids))
        return files


def read_names(path: Path, say: Say) -> ClassNames:
    """Read class names; say how, if it is not a plain list."""
    classes = read_class_names(path)
    of_ids = () if classes.ids is None else (f"they have ids, as {classes.ids[0]}",)
    if notes := (*classes.notes, *of_ids):
        ends = f"{classes.names[0]} to {classes.names[-1]}"
        say(path.name, f"{len(classes.names)} classes, {ends}; {'; '.join(notes)}", None)
    return classes


def change_classes(
    model_set: ModelSet, labels: Path | None, class_ids: Path | None, say: Say
) -> ModelSet:
    """Give a set other labels, other class ids, or both; the networks stay.

    Raises :class:`ModelSetError` if their number is not the set's, or the set has ids and gets the
    same labels in another order without others.
    """
    before = SetClasses(model_set.labels, model_set.class_ids)
    if labels is None:
        now = before.with_ids(class_ids, model_set.name, say)
    else:
        now = SetClasses.read(labels, class_ids, say)
        if len(now.labels) != len(before.labels):
            raise ModelSetError(
                f"{labels} has {len(now.labels)} labels; {model_set.name} has "
                f"{len(before.labels)} classes, in the networks' order"
            )
    is_moved = now.labels != before.labels and sorted(now.labels) == sorted(before.labels)
    if now.ids is None and before.ids is not None:
        if is_moved:
            raise ModelSetError(
                f"{labels} has the labels of {model_set.name} in another order, which its class "
                "ids do not follow: give these too, --class-ids FILE"
            )
        now = SetClasses(now.labels, before.ids)
    folder = model_set.folder
    with change(folder, MADE_BY) as staging:
        if read_manifest(folder) != model_set.manifest:
            raise ModelSetError(f"{folder} was changed meanwhile: nothing is written; try again")
        staging.move_in(_renamed(model_set.manifest, now.written(staging), before, now, is_moved))
    return ModelSet(folder, read_manifest(folder))


def _renamed(
    manifest: Manifest,
    files: dict[str, FileRecord],
    before: SetClasses,
    now: SetClasses,
    is_moved: bool,
) -> Manifest:
    """Return the manifest with other files of classes.

    Records hold on if ids say that the classes are the same, or the labels do and had no ids.
    """
    renamed = manifest.model_copy(update={**files, **(OF_ORDER if is_moved else {})})
    plan = renamed.fast_plan
    if plan is not None and plan.made_for == manifest.plan_key(plan.precision):
        plan = plan.model_copy(update={"made_for": renamed.plan_key(plan.precision)})
    is_same = list(now.labels) == list(before.labels) and before.ids is None
    is_same |= before.ids is not None and list(now.ids or ()) == list(before.ids)
    accuracy = tuple(
        record.model_copy(update={"conditions": renamed.conditions})
        if is_same and record.conditions == manifest.conditions
        else record
        for record in manifest.accuracy
    )
    return renamed.model_copy(update={"fast_plan": plan, "accuracy": accuracy})


def _lines(names: Sequence[str]) -> str:
    return "".join(f"{name}\n" for name in names)
