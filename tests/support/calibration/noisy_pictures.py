"""Noisy pictures of three colours, each unlike the others, in folders of their classes."""

from pathlib import Path

import cv2
import numpy as np

CLASSES = ("blue", "green", "red")


def write_noisy(folder: Path, number: int, seed: int = 0, classes=CLASSES) -> Path:
    """Write ``number`` pictures of each class, which a tiny network's features tell apart."""
    rng = np.random.default_rng(seed)
    for place, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for count in range(number):
            pixels = rng.integers(0, 100, (24, 24, 3)) + rng.integers(0, 40, 3)
            pixels[..., place] += 100
            content = cv2.imencode(".png", np.clip(pixels, 0, 255).astype(np.uint8))[1]
            (folder / name / f"{seed}-{count}.png").write_bytes(content.tobytes())
    return folder
