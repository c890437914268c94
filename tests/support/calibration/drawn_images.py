"""Small folders of drawn images that a network can learn to tell apart."""

from pathlib import Path

import cv2
import numpy as np

CLASSES = ("n01440764", "n02102040", "n02979186")
COLORS = ((40, 40, 220), (40, 220, 40), (220, 40, 40))  # BGR


def draw_folder(folder: Path, per_class: int, seed: int) -> Path:
    """Write an ImageFolder whose classes differ by colour."""
    rng = np.random.default_rng(seed)
    for name, color in zip(CLASSES, COLORS, strict=True):
        (folder / name).mkdir(parents=True)
        for index in range(per_class):
            image = rng.integers(0, 60, (48, 56, 3), np.uint8)
            cv2.circle(image, (28, 24), int(rng.integers(10, 24)), color, -1)
            cv2.imwrite(str(folder / name / f"{index}.jpg"), image)
    return folder
