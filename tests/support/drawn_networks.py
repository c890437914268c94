"""Networks with random weights, of any number of classes, and faults of the pixels before them.

They answer drawn pictures as trained ones do: a few classes lead, and colours, brightness and
size matter.
"""

from collections.abc import Callable
from itertools import pairwise

import cv2
import numpy as np
import openvino as ov
from openvino import opset13 as ops

from models.network import Pixels

SIZE = 64
CHANNELS = (3, 16, 32)
GRID = 4  # places that the features are averaged over: where something is matters
DARKER = 40  # levels


def random_model(num_classes: int, sharpness: float = 1.0, size: int = SIZE) -> ov.Model:
    """Return uint8 (N, size, size, 3) to probabilities (N, num_classes)."""
    rng = np.random.default_rng(7)
    pixels = ops.parameter([-1, size, size, 3], ov.Type.u8)
    features = ops.transpose(ops.convert(pixels, "f32"), np.array([0, 3, 1, 2]))
    features = ops.subtract(ops.divide(features, np.float32(64)), np.float32(2))
    for before, after in pairwise(CHANNELS):
        kernel = rng.normal(0, (2 / (9 * before)) ** 0.5, (after, before, 3, 3)).astype(np.float32)
        features = ops.convolution(features, kernel, [2, 2], [1, 1], [1, 1], [1, 1])
        features = ops.relu(features)
    places = ops.adaptive_avg_pool(features, np.array([GRID, GRID]))
    flat = ops.reshape(places, np.array([0, -1]), special_zero=True)
    width = CHANNELS[-1] * GRID * GRID
    weights = rng.normal(0, sharpness, (width, num_classes)).astype(np.float32)
    return ov.Model([ops.softmax(ops.matmul(flat, weights, False, False), 1)], [pixels], "random")


def swapped(images: Pixels) -> Pixels:
    return np.ascontiguousarray(images[..., ::-1])


def darker(images: Pixels) -> Pixels:
    return np.maximum(images.astype(np.int16) - DARKER, 0).astype(np.uint8)


def enlarged(images: Pixels) -> Pixels:
    """Return the middle 7/8 of the images, as after another resize rule than the set's."""
    side = images.shape[1]
    cut = side // 16
    inner = images[:, cut : side - cut, cut : side - cut]
    return np.stack([cv2.resize(image, (side, side)) for image in inner])


FAULTS: dict[str, Callable[[Pixels], Pixels]] = {
    "swapped": swapped,
    "darker": darker,
    "enlarged": enlarged,
}
