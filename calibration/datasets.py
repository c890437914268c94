"""Reads datasets: labelled images (ImageFolder, or CSV of file and label), mapped to classes.

The images of a multi-label set have any number of labels. In the list they stand between
semicolons, ``photo.jpg,cat;dog``; an image may have none. In an ImageFolder
(``DIR/<class>/<file>``) each has one.
"""

import csv
import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.errors import ModelSetError
from models.image_files import SUFFIXES, images_below, is_hidden, is_image
from models.model_set import ModelSet, class_indices, some
from models.record import sha256_of

HEADERS = (["file", "label"], ["file", "labels"])  # of a list; it may have no header
SEPARATOR = ";"  # of the labels of an image


@dataclass(frozen=True)
class ImageFile:
    """One image of a dataset."""

    path: Path

    def read_bytes(self) -> bytes:
        """Return the file's content; raise OSError if it cannot be read."""
        return self.path.read_bytes()


@dataclass(frozen=True)
class LabelledImage(ImageFile):
    """One image file and the index of its class."""

    class_index: int


@dataclass(frozen=True)
class Dataset:
    """Labelled images of a model set's classes, sorted by path; never empty."""

    name: str
    images: tuple[LabelledImage, ...]
    notes: tuple[str, ...]  # for readers of the figures: classes without images


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


def read_dataset(
    source: Path, model_set: ModelSet, class_ids: Sequence[str] | None = None
) -> Dataset:
    """Read an ImageFolder (``source/<class>/<file>``) or a list with ``file,label`` lines.

    A class is named by its id (``class_ids``, by default the set's), its label or its number. An
    ImageFolder whose names say nothing must have one folder per class, in the sorted order. Raises
    :class:`ModelSetError` if there are no images, labels that are no classes of the set, or folders
    whose order differs as text and by their numbers.
    """
    if source.is_dir():
        named = folder_files(source)
        names = sorted(p.name for p in source.iterdir() if p.is_dir() and not is_hidden(p.name))
    elif source.is_file():
        named = listed_files(source)
        names = sorted({label for _, label in named})
    else:
        problem = f"{source} is neither a folder nor a list; give an ImageFolder or a CSV"
        raise ModelSetError(problem)
    index_of, note = class_indices(names, model_set, source, class_ids)
    single = _each_once(named, source)
    images = tuple(LabelledImage(path, index_of[label]) for path, label in single)
    notes = [*note]
    if num_again := len(named) - len(single):
        notes.append(f"{num_again} entries name a file that stands before them: it counts once")
    notes += _absent(model_set, {image.class_index for image in images})
    return Dataset(short_name(source), images, tuple(notes))


def read_label_sets(
    source: Path, model_set: ModelSet, class_ids: Sequence[str] | None = None
) -> LabelSets:
    """Read a list with ``file,labels`` lines, or an ImageFolder.

    A class is named by its id, its label, or its number, as in :func:`read_dataset`. Raises
    :class:`ModelSetError` if there are no images, none has a label, a file is there twice, or a
    label is no class.
    """
    if not source.is_file():
        of_one = read_dataset(source, model_set, class_ids)
        images = tuple(MultiLabelledImage(i.path, (i.class_index,)) for i in of_one.images)
        return LabelSets(of_one.name, images, of_one.notes)
    split = [
        (path, {label.strip() for label in text.split(SEPARATOR)} - {""})
        for path, text in listed_files(source)
    ]
    counts = Counter(path.resolve() for path, _ in split)
    if doubled := sorted(str(path) for path, count in counts.items() if count > 1):
        raise ModelSetError(
            f"{source} lists {len(doubled)} files twice, as {doubled[0]}: write all labels of a "
            f"file on one line, with {SEPARATOR} between them"
        )
    if not (names := sorted({label for _, labels in split for label in labels})):
        raise ModelSetError(
            f"{source}: no image has a label; each line is file,labels, as photo.jpg,cat;dog"
        )
    index_of, note = class_indices(names, model_set, source, class_ids)
    images = tuple(
        MultiLabelledImage(path, tuple(sorted(index_of[label] for label in labels)))
        for path, labels in split
    )
    present = {index for image in images for index in image.classes}
    absent = [f"{text}; not in the means" for text in _absent(model_set, present)]
    return LabelSets(short_name(source), images, (*note, *absent))


def _absent(model_set: ModelSet, present: Container[int]) -> list[str]:
    absent = [label for index, label in enumerate(model_set.labels) if index not in present]
    return [f"no images of {len(absent)} classes: {some(absent)}"] if absent else []


def _each_once(named: list[tuple[Path, str]], source: Path) -> list[tuple[Path, str]]:
    """Remove repeated entries of a file, through links too; raise if their labels differ."""
    label_of: dict[Path, str] = {}
    single = list[tuple[Path, str]]()
    for path, label in named:
        before = label_of.setdefault(file := path.resolve(), label)
        if before != label:
            raise ModelSetError(
                f"{source}: {file} stands under the labels {before} and {label}; an image of a "
                "classification set has one: leave the wrong entries out"
            )
        if len(label_of) > len(single):
            single.append((path, label))
    return single


def truth_of(images: Iterable[LabelledImage]) -> npt.NDArray[np.int64]:
    """Return the class of each image: (N,)."""
    return np.array([image.class_index for image in images], np.int64)


def label_truth_of(images: list[MultiLabelledImage], num_classes: int) -> npt.NDArray[np.bool_]:
    """Return which labels each image has: (N, C)."""
    truth = np.zeros((len(images), num_classes), np.bool_)
    for row, image in enumerate(images):
        truth[row, list(image.classes)] = True
    return truth


def find_images(folder: Path) -> list[Path]:
    """Return every image below ``folder``, sorted, without hidden folders; raise without any."""
    if not folder.is_dir():
        raise ModelSetError(f"{folder} is not a folder; give one with images in it")
    if not (images := images_below(folder)):
        raise ModelSetError(f"no images in {folder}: expected {', '.join(SUFFIXES)} files")
    return images


def short_name(source: Path) -> str:
    """Return the last two parts of the path, as printable text."""
    full = source.resolve()
    return f"{full.parent.name}/{full.name}".encode("utf-8", "replace").decode()


def folder_files(folder: Path) -> list[tuple[Path, str]]:
    """Return each image of an ImageFolder and its folder's name, sorted; raise without any."""
    paths = sorted(p for p in folder.glob("*/*") if is_image(p) and not is_hidden(p.parent.name))
    if not paths:
        raise ModelSetError(f"no images in {folder}: expected {folder}/<class>/<name>.jpg")
    return [(path, path.parent.name) for path in paths]


def listed_files(path: Path) -> list[tuple[Path, str]]:
    """Read ``file,label`` lines, with or without a header; file names are relative to the list."""
    listed: list[tuple[Path, str]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as opened:  # with Excel's byte order mark
            for number, row in enumerate(csv.reader(opened), start=1):
                if not row or [cell.strip().lower() for cell in row] in HEADERS:
                    continue
                if "\0" in "".join(row):  # UTF-16
                    raise csv.Error
                if len(row) != 2:
                    raise ModelSetError(f"{path}, line {number}: {len(row)} columns; file,label")
                listed.append((path.parent / row[0].strip(), row[1].strip()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ModelSetError(f"{path} is not a UTF-8 text of file,label lines") from error
    if not listed:
        raise ModelSetError(f"{path} lists no image; each line is file,label")
    return sorted(listed)


def file_hashes(images: Iterable[ImageFile]) -> dict[Path, str]:
    """Return the SHA-256 of each file that can be read."""
    hashes = dict[Path, str]()
    for image in images:
        with suppress(OSError, ModelSetError):
            if image.path.is_file():
                hashes[image.path] = sha256_of(image.path)
    return hashes


def images_digest(sha256s: Iterable[str]) -> str:
    """Return a hash over the images' hashes, independent of their order: ``images_sha256``."""
    return hashlib.sha256("".join(sorted(sha256s)).encode()).hexdigest()
