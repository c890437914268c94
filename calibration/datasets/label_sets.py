"""Reads datasets whose images have any number of labels: a CSV of ``file,labels``, or folders.

In the list the labels of an image stand between semicolons, ``photo.jpg,cat;dog``; an image may
have none. In an ImageFolder (``DIR/<class>/<file>``) each has one.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calibration.datasets.labelled import (
    ImageFile,
    class_indices,
    listed_files,
    read_dataset,
    short_name,
    some,
)
from models.errors import ModelSetError
from models.model_set import ModelSet

SEPARATOR = ";"


@dataclass(frozen=True)
class MultiLabelledImage(ImageFile):
    """One image file and the indices of its labels, ascending; it may have none."""

    classes: tuple[int, ...]


@dataclass(frozen=True)
class LabelSets:
    """Images of a multi-label set's classes, sorted by path; at least one has a label."""

    name: str
    images: tuple[MultiLabelledImage, ...]
    notes: tuple[str, ...]


def read_label_sets(source: Path, model_set: ModelSet) -> LabelSets:
    """Read a list with ``file,labels`` lines, or an ImageFolder.

    A class is named by its id, its label, or its number, as in
    :func:`calibration.datasets.labelled.read_dataset`; all in one way.

    Raises:
        ModelSetError: no images, none with a label, a file twice, or labels that are no classes.

    """
    if not source.is_file():
        of_one = read_dataset(source, model_set)
        images = tuple(
            MultiLabelledImage(image.path, (image.class_index,)) for image in of_one.images
        )
        return LabelSets(of_one.name, images, of_one.notes)
    split = [(path, _labels(text)) for path, text in listed_files(source)]
    _check_once([path.resolve() for path, _ in split], source)
    names = sorted({label for _, labels in split for label in labels})
    if not names:
        raise ModelSetError(
            f"{source}: no image has a label; each line is file,labels, as photo.jpg,cat;dog"
        )
    index_of, note = class_indices(names, model_set, source)
    images = tuple(
        MultiLabelledImage(path, tuple(sorted(index_of[label] for label in labels)))
        for path, labels in split
    )
    return LabelSets(short_name(source), images, _notes(images, model_set, note))


def truth_of(images: list[MultiLabelledImage], num_classes: int) -> npt.NDArray[np.bool_]:
    """Return which labels each image has: (N, C)."""
    truth = np.zeros((len(images), num_classes), np.bool_)
    for row, image in enumerate(images):
        truth[row, list(image.classes)] = True
    return truth


def _labels(text: str) -> set[str]:
    return {label.strip() for label in text.split(SEPARATOR)} - {""}


def _check_once(paths: list[Path], source: Path) -> None:
    doubled = sorted(str(path) for path, count in Counter(paths).items() if count > 1)
    if doubled:
        raise ModelSetError(
            f"{source} lists {len(doubled)} files twice, as {doubled[0]}: write all labels of a "
            f"file on one line, with {SEPARATOR} between them"
        )


def _notes(
    images: tuple[MultiLabelledImage, ...], model_set: ModelSet, note: str | None
) -> tuple[str, ...]:
    """Return notes for readers of the figures."""
    there = {index for image in images for index in image.classes}
    absent = [label for i, label in enumerate(model_set.labels) if i not in there]
    notes = [note] if note else []
    if absent:
        notes.append(f"no images of {len(absent)} classes: {some(absent)}; not in the means")
    return tuple(notes)
