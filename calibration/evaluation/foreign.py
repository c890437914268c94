"""Images of other classes, which a set does not know: how many of its answers to them are sure."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from calibration.datasets import LabelledImage, find_images, short_name
from calibration.evaluation.evaluate import FAST, Modes
from calibration.evaluation.fitting import Rows, foreign_record
from calibration.evaluation.inference import Networks, Track
from models.errors import ModelSetError
from models.model_set import ModelSet
from models.plan import ForeignRecord
from models.record import Precision

NO_CLASS = -1


def read_foreign(folder: Path, model_set: ModelSet) -> tuple[list[LabelledImage], str]:
    """Return the images below a folder, without those in folders named as the set's classes.

    The text says what was left out. Raises :class:`ModelSetError` if nothing is left.
    """
    own = {*model_set.labels, *(model_set.class_ids or ())}
    paths = find_images(folder)
    kept = [path for path in paths if not own & {*path.relative_to(folder).parts[:-1]}]
    if not kept:
        raise ModelSetError(
            f"--foreign {folder}: all {len(paths)} images are in folders named as classes of "
            f"{model_set.name}; give images of other classes"
        )
    num_own = len(paths) - len(kept)
    note = f"{num_own} images left out: their folders are named as the set's classes"
    return [LabelledImage(path, NO_CLASS) for path in kept], note if num_own else ""


def foreign_rows(
    model_set: ModelSet,
    precision: Precision,
    images: Sequence[LabelledImage],
    folder: Path,
    track: Track[LabelledImage] = lambda batches, _: batches,
) -> Rows:
    """Return the members' answers to images of other classes; unreadable ones are left out."""
    rows = Rows(model_set.manifest, precision, short_name(folder))
    unreadable = []
    for answered in Networks(model_set, (precision,)).answers(images, track, rows.add):
        unreadable += answered.unreadable
    if len(unreadable) == len(images):
        path, why = unreadable[0][0].path, unreadable[0][1]
        raise ModelSetError(f"--foreign: none of {len(images)} images can be read: {path}: {why}")
    return rows


def sure_of_foreign(model_set: ModelSet, rows: Rows) -> dict[str, ForeignRecord]:
    """Return how many answers are sure in each mode of a set, of the images that judge.

    The mode ``fast`` is the whole plan. Raises :class:`ModelSetError` if no mode has a bound, or
    no image judges.
    """
    judge, modes = rows.mask("judge"), Modes(model_set.manifest, rows.precision)
    if not judge.any():
        raise ModelSetError(
            f"--foreign: none of {len(judge)} images is in the half that judges; give more"
        )
    members = {name: of[judge] for name, of in rows.members.items()}
    reached: dict[str, list[bool]] = {}
    for name, trust, answers, _ in modes.answers(members):
        if trust.sure_from is None:
            continue
        own = (answers.max(axis=1) >= np.float32(trust.sure_from)).tolist()
        reached[name] = own
        if name.startswith(FAST):
            reached.setdefault("fast", []).extend(own)
    if not reached:
        raise ModelSetError(
            f"--foreign: {model_set.name} has no bound of sure answers; tandem evaluate "
            f"{model_set.argument} --images DIR --sure-at 0.95 --foreign DIR chooses one"
        )
    return {name: foreign_record(own, rows.dataset) for name, own in reached.items() if own}
