"""Draws the calibration and the validation images, and records their hashes."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from calibration.datasets import (
    LabelledImage,
    file_hashes,
    find_images,
    read_dataset,
)
from calibration.quantization.quantize import Labelled
from models.errors import ImageError, ModelSetError
from models.image_inputs import ImageInputs
from models.model_set import ModelSet
from models.runtime import Pixels

SEED = 20
# With fewer held-out images, chance alone moves top-1 by more than half a percentage point.
MIN_VALIDATION = 400
MAX_VALIDATION = 2000


@dataclass
class Chosen:
    """Images drawn from a folder: pixels as in ImageInputs, and the files used or skipped."""

    pixels: list[Pixels] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def draw_images(
    folder: Path, num_images: int, inputs: ImageInputs, is_asked: bool = False
) -> Chosen:
    """Draw ``num_images`` readable images at random, with seed 20, so that runs are repeatable.

    Raises:
        ModelSetError: the folder has fewer. With ``is_asked`` the message says that the user chose
            the number.

    """
    paths = find_images(folder)
    random.Random(SEED).shuffle(paths)
    chosen = Chosen()
    for path in paths:
        if len(chosen.pixels) == num_images:
            break
        try:
            data = path.read_bytes()
            chosen.pixels.append(inputs.read(data))
        except (ImageError, OSError) as error:
            chosen.unreadable.append(f"{path}: {error}")
            continue
        chosen.paths.append(path)
        chosen.hashes.append(hashlib.sha256(data).hexdigest())
    if len(chosen.pixels) < num_images:
        bad = f" ({len(chosen.unreadable)} more cannot be read)" if chosen.unreadable else ""
        source = "asked for" if is_asked else "the set's quantization.subset_size"
        raise ModelSetError(
            f"{folder} has {len(chosen.pixels)} images{bad}; {num_images} are {source}. Give more, "
            f"or --subset-size {max(1, len(chosen.pixels))} (under 100, INT8 may lose accuracy)"
        )
    return chosen


@dataclass(frozen=True)
class HeldOut:
    """Labelled images that calibration does not use, to measure the drop; or why there are none.

    ``labelled`` has pixels as in :class:`ImageInputs`, or is None. ``description`` names the
    images, or says why there are none.
    """

    description: str
    labelled: Labelled | None = None
    hashes: tuple[str, ...] = ()
    dataset: str = ""


def held_out(
    images: Path | None, validation: Path | None, model_set: ModelSet, calibration: Chosen
) -> HeldOut:
    """Read the images of ``validation``, or else those of ``images`` that calibration left.

    The latter are used only if they are labelled and enough, without copies of calibration images.
    At most 2000 are used, since they are held in memory.

    Raises:
        ModelSetError: ``validation`` cannot be used, or has calibration images.

    """
    if model_set.manifest.task == "multi_label":
        return _of_multi_label(model_set, validation)
    if validation is not None:
        dataset = read_dataset(validation, model_set)
        taken = set[Path]()
    elif images is None:
        return HeldOut("nothing: packaged photographs have no labels of this set")
    else:
        try:
            dataset = read_dataset(images, model_set)
        except ModelSetError as error:
            return HeldOut(f"nothing: {images} is no labelled dataset of this set: {error.message}")
        taken = {path.resolve() for path in calibration.paths}
    left = [image for image in dataset.images if image.path.resolve() not in taken]
    if len(left) > MAX_VALIDATION:
        left = random.Random(SEED).sample(left, MAX_VALIDATION)
    used = set(calibration.hashes)
    copies = {path for path, value in file_hashes(left).items() if value in used}
    if validation is not None and copies:
        raise ModelSetError(
            f"--validation {validation}: {len(copies)} of {len(left)} images calibrate INT8 too, "
            f"as {min(copies)}: the drop on them proves nothing. Give other images, or leave "
            "--validation out, and what calibration leaves of --images measures the drop"
        )
    left = [image for image in left if image.path not in copies]
    if validation is None and len(left) < MIN_VALIDATION:
        return HeldOut(f"{len(left)} images are left for it, {MIN_VALIDATION} are needed")
    labelled, hashes = _read(left, model_set.manifest.inputs)
    description = f"{len(hashes)} images of {validation or images}"
    return HeldOut(description, labelled, tuple(hashes), dataset.name)


def _of_multi_label(model_set: ModelSet, validation: Path | None) -> HeldOut:
    """Return no images: accuracy control needs top-1, which multi-label sets do not have."""
    if validation is not None:
        raise ModelSetError(
            f"--validation: {model_set.name} is multi-label, and layers are taken back to float by "
            "top-1, which it has not; leave it out, and let tandem evaluate measure what INT8 costs"
        )
    return HeldOut(f"none: {model_set.name} is multi-label; tandem evaluate measures it")


def _read(images: Sequence[LabelledImage], inputs: ImageInputs) -> tuple[Labelled, list[str]]:
    pixels, truth, hashes = [], [], []
    for image in images:
        try:
            data = image.path.read_bytes()
            pixels.append(inputs.read(data))
        except (ImageError, OSError):
            continue  # evaluate lists unreadable files; here they are skipped
        truth.append(image.class_index)
        hashes.append(hashlib.sha256(data).hexdigest())
    if not pixels:
        raise ModelSetError(f"none of {len(images)} validation images can be read")
    return Labelled(np.stack(pixels), np.array(truth, np.int64)), hashes
