"""The photos that a load consists of: read from a folder, or drawn."""

from pathlib import Path

import cv2
import numpy as np

from app.errors import ConfigError
from models.image_files import find_files

MAX_BYTES = 512 * 2**20  # of photos held in memory; more are left out


def photos_in(folder: Path) -> list[bytes]:
    """Read the images of a folder in the order of their names, as many as memory is set aside for.

    Raises:
        NothingToClassifyError: there is none.
        ConfigError: one cannot be read.

    """
    bodies: list[bytes] = []
    total = 0
    for path in find_files([str(folder)]):
        try:
            body = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        total += len(body)
        if bodies and total > MAX_BYTES:
            break
        bodies.append(body)
    return bodies


def drawn_photos(num_photos: int = 16, width: int = 500, height: int = 375) -> list[bytes]:
    """Draw JPEGs of the size that ImageNet's photos have; their contents tell nothing."""
    rng = np.random.default_rng(20)
    bodies = []
    for _ in range(num_photos):
        coarse = rng.integers(0, 256, (12, 16, 3), np.uint8)
        smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        grainy = cv2.add(smooth, rng.integers(0, 24, smooth.shape, np.uint8))
        bodies.append(cv2.imencode(".jpg", grainy, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes())
    return bodies
