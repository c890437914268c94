"""Splits images into those that weights are fitted to and those that judge them.

By a hash of the file: the same images are split alike in every run, in whichever order and among
whichever others they come, and two copies of an image are on the same side.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from calibration.datasets.labelled import LabelledImage
from models.errors import ModelSetError
from models.record import sha256_of


def is_for_fitting(path: Path) -> bool:
    """Whether an image is one of the half that weights are fitted to."""
    try:
        digest = sha256_of(path)
    except ModelSetError:  # it is listed as unreadable when its turn comes
        digest = hashlib.sha256(str(path).encode("utf-8", "replace")).hexdigest()
    return int(digest[:8], 16) % 2 == 0


def split(images: Sequence[LabelledImage]) -> tuple[list[LabelledImage], list[LabelledImage]]:
    """Return the images to fit on and those to judge with, each in the order given."""
    to_fit: list[LabelledImage] = []
    to_judge: list[LabelledImage] = []
    for image in images:
        (to_fit if is_for_fitting(image.path) else to_judge).append(image)
    return to_fit, to_judge
