"""A member's file for another runtime than OpenVINO, and how it is tried before it is taken."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from calibration.sets.batch import NUM_TRIED, TensorLayout, random_images
from calibration.sets.classes import ClassMap
from calibration.sets.ending import Outputs
from calibration.sets.fold import ColorOrder, Normalisation
from models.errors import ModelSetError
from models.record import SUFFIXES, Precision, RuntimeName
from models.runtimes.load import load
from models.runtimes.options import RuntimeOptions

Sides = tuple[int | None, ...]  # of a tensor; None: left open


@dataclass(frozen=True)
class ImportedFile:
    """A folded network as the one file of its runtime."""

    runtime: RuntimeName
    content: bytes
    input_size: int
    num_classes: int
    precision: Precision
    fixed_batch: int | None = None


@dataclass(frozen=True)
class FileOptions:
    """How a file is to be read; as in :func:`calibration.sets.import_network.import_network`."""

    input_size: int | None = None
    normalisation: Normalisation = field(default_factory=Normalisation)
    outputs: Outputs = "auto"
    layout: TensorLayout | None = None
    pixel_order: ColorOrder | None = None
    classes: ClassMap | None = None


# Makes the file: with softmax at its end or without, for the set's classes or (None) its own.
Make = Callable[[bool, ClassMap | None], ImportedFile]


def layout_and_size(
    sides: Sides, told: str, options: FileOptions
) -> tuple[TensorLayout, int, int | None]:
    """Return the layout, the side in pixels and the built-in batch of an input's four sides.

    Raises:
        ModelSetError: it is no square colour image; ``told`` begins the message.

    """
    if len(sides) != 4:
        raise ModelSetError(f"{told}; a member takes images, [N,3,H,W] or [N,H,W,3]")
    layout: TensorLayout = options.layout or ("NCHW" if sides[1] == 3 else "NHWC")
    channels = sides[1] if layout == "NCHW" else sides[3]
    height, width = sides[2:] if layout == "NCHW" else sides[1:3]
    if channels != 3:
        raise ModelSetError(f"{told}; no side is 3 channels: a member takes colour images")
    if height != width:
        raise ModelSetError(f"{told}; a member takes squares")
    size = height or options.input_size
    if size is None:
        raise ModelSetError(f"{told}: its size is open, so say --input-size (224 for ImageNet)")
    if options.input_size not in (None, size):
        raise ModelSetError(f"{told}, --input-size says {options.input_size}")
    return layout, size, sides[0]


def num_classes_of(sides: Sides, told: str) -> int:
    """Return C of an output (N, C), (N, C, 1, 1) or (N, 1, 1, C).

    Raises:
        ModelSetError: it is no row of classes; ``told`` begins the message.

    """
    wide = [side for side in sides[1:] if side != 1]
    if len(sides) < 2 or len(wide) > 1 or None in wide:
        raise ModelSetError(
            f"{told}; a member gives probabilities [?,C], one row an image: networks for "
            "detection, segmentation or features are no classifiers"
        )
    return int(wide[0] or 1) if wide else 1


def tried(make: Make, path: Path, options: FileOptions) -> ImportedFile:
    """Make the file, run it on images, and append softmax if it ends in logits.

    Raises:
        ModelSetError: its runtime cannot run it, or its rows are no distribution.

    """
    has_softmax, found = False, None
    if options.outputs != "logits":
        found = _distribution(make(False, None), path)
    if found is None and options.outputs != "probabilities":
        has_softmax, found = True, _distribution(make(True, None), path)
    if found is None:
        raise ModelSetError(
            f"{path} does not give probabilities: rows must be 0..1 and sum to 1; if it ends in "
            "logits, say --outputs logits"
        )
    if (classes := options.classes) is None or classes.own == classes.wanted:
        return found
    if found.num_classes != len(classes.own):
        raise ModelSetError(
            f"{path} has {found.num_classes} classes, {classes.where} {len(classes.own)} ids: "
            "they are not of the same network"
        )
    return make(has_softmax, classes)


def multi_label(path: Path) -> ModelSetError:
    """Return the error of a network that ends in a sigmoid."""
    return ModelSetError(
        f"{path} ends in a sigmoid, a score for each class by itself (multi-label): an ensemble "
        "here averages distributions. If its classes exclude each other, export what goes into "
        "the sigmoid"
    )


def _distribution(found: ImportedFile, path: Path) -> ImportedFile | None:
    """Return the file if its rows are probabilities."""
    with tempfile.TemporaryDirectory(prefix="tandem-add-") as folder:
        file = Path(folder) / f"{path.stem}{SUFFIXES[found.runtime]}"
        file.write_bytes(found.content)
        network = load(file, RuntimeOptions(batch_sizes=(NUM_TRIED,)))
        network.check_fits(found.input_size, found.num_classes)
        rows = network.predict(random_images(NUM_TRIED, network.input_shape))
    if np.isnan(rows).any():
        raise ModelSetError(f"{path} answers NaN to an image: its weights are damaged")
    is_one = rows.min() >= -1e-4 and np.allclose(rows.sum(axis=1), 1, atol=1e-2)
    return found if is_one else None
