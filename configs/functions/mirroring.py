"""A ``preprocess`` of one's own: test-time mirroring.

``configs/mirroring.yaml`` serves with it. Each member sees every image and its mirror image, and
says the mean of what it says of both.
"""

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


def with_mirror_images(images: Pixels) -> Pixels:
    """Return uint8 (2 * N, H, W, 3) of (N, H, W, 3): the images, then their mirror images."""
    return np.concatenate([images, images[:, :, ::-1]])
