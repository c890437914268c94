"""Classifiers of every shape, small enough that numpy says what they must answer."""

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino import opset15

from calibration.sets.ending import Outputs
from calibration.sets.import_network import Imported, import_network
from calibration.sets.input import Normalisation
from calibration.sets.options import FileOptions
from models.openvino_network import CompiledNetwork, RuntimeOptions
from tests.support.calibration.added_sets import softmax

SIDE = 8
MATRIX = np.array([[3, -1, 0, 1], [0, 2, -2, 1], [1, 0, 4, -1]], np.float32)  # channel -> class
PLAIN = Normalisation((0.0, 0.0, 0.0), (255.0, 255.0, 255.0), "BGR")
IMAGENET = Normalisation()
IMAGES = np.random.default_rng(7).integers(0, 256, (4, SIDE, SIDE, 3)).astype(np.uint8)


def save(model: ov.Model, folder: Path) -> Path:
    ov.save_model(model, folder / "net.xml", compress_to_fp16=False)
    return folder / "net.xml"


def classifier(
    shape: list[int], end: str = "logits", kind: ov.Type = ov.Type.f32, channels: int = 1
) -> ov.Model:
    """Classes are a matrix times the mean colour; ``channels``: which dimension they are."""
    pixels = ops.parameter(shape, kind, name="pixels")
    sides = [d for d in (1, 2, 3) if d != channels]
    floats = pixels if kind == ov.Type.f32 else ops.convert(pixels, "f32")
    logits = ops.matmul(ops.reduce_mean(floats, np.array(sides), False), MATRIX, False, False)
    return ov.Model([ending(logits, end)], [pixels], "classifier")


def ending(logits: ov.Node, end: str) -> ov.Node:
    square = ops.unsqueeze(logits, np.array([2, 3]))
    return {
        "logits": lambda: logits,
        "probabilities": lambda: ops.softmax(logits, 1),
        "square": lambda: square,
        "squeezed": lambda: opset15.squeeze(square),
        "one row": lambda: ops.reshape(logits, np.array([1, 4]), False),
        "flat": lambda: ops.reshape(logits, np.array([-1]), False),
        "map": lambda: ops.concat([square, square], 3),
        "negative": lambda: ops.negative(ops.softmax(logits, 1)),
    }[end]()


def read(
    path: Path, size: int | None, how: Normalisation, outputs: Outputs = "auto", **more: Any
) -> Imported:
    """Import the network of a file."""
    return import_network(path, FileOptions(size, how, outputs, **more))


def answers(imported: Imported, images: np.ndarray = IMAGES) -> np.ndarray:
    options = RuntimeOptions(batch_sizes=(len(images),))
    return CompiledNetwork(imported.network, options).predict(images)


def expected(how: Normalisation, images: np.ndarray = IMAGES) -> np.ndarray:
    pixels = images if how.color_order == "BGR" else images[..., ::-1]
    floats = (pixels.astype(np.float64) - how.mean) / how.scale
    return softmax(floats.mean(axis=(1, 2)) @ MATRIX)
