"""Splits images into those for fitting weights and those for judging.

A hash of the file decides. So an image is on the same side in every run, whatever the order and the
other images, and copies of an image are on the same side.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from calibration.datasets import LabelledImage
from models.errors import ModelSetError
from models.record import sha256_of


def is_for_fitting(path: Path) -> bool:
    """Whether an image belongs to the half for fitting weights."""
    try:
        digest = sha256_of(path)
    except ModelSetError:  # unreadable, which is listed later
        digest = hashlib.sha256(str(path).encode("utf-8", "replace")).hexdigest()
    return int(digest[:8], 16) % 2 == 0


def split(images: Sequence[LabelledImage]) -> tuple[list[LabelledImage], list[LabelledImage]]:
    """Return the images for fitting and those for judging, each in their original order."""
    to_fit: list[LabelledImage] = []
    to_judge: list[LabelledImage] = []
    for image in images:
        (to_fit if is_for_fitting(image.path) else to_judge).append(image)
    return to_fit, to_judge
