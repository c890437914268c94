"""Multi-label model sets made in code: a class per colour channel, each with its own sigmoid.

What a picture scores is known without running anything: the sigmoid of ``gain`` x (the channel's
mean, 0..1, less ``BIAS``). A picture may have several of the labels, or none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import openvino as ov
from openvino import opset13 as ops

from calibration.sets.transaction import write_manifest
from models.manifest import Manifest, MemberRecord
from models.record import FileRecord, ImageRecord
from tests.support.tiny_networks import record_golden, save_model

LABELS = ("has blue", "has green", "has red")
SIZE = 16  # px
BIAS = 0.375
GAINS = {"steep": 12.0, "flat": 3.0}
# Pictures of one colour, BGR, and the labels that they have.
PICTURES = {
    "cyan": ((255, 200, 0), ("has blue", "has green")),
    "red": ((10, 0, 240), ("has red",)),
    "white": ((255, 230, 240), LABELS),
    "black": ((0, 5, 10), ()),
}


def scored_model(gain: float, size: int = SIZE, end: str = "sigmoid") -> ov.Model:
    """u8 [?,size,size,3] -> sigmoid of gain x (mean colour - BIAS); or ``end`` of the logits."""
    pixels = ops.parameter([-1, size, size, 3], ov.Type.u8, name="pixels")
    scaled = ops.divide(ops.convert(pixels, "f32"), np.float32(255))  # exact as FP16, as BIAS is
    means = ops.reduce_mean(scaled, np.array([1, 2]), keep_dims=False)  # (N, 3)
    logits = ops.multiply(ops.subtract(means, np.float32(BIAS)), np.float32(gain))
    rows = {
        "sigmoid": lambda: ops.sigmoid(logits),
        "square": lambda: ops.unsqueeze(ops.sigmoid(logits), np.array([2, 3])),
        "logits": lambda: logits,
        "softmax": lambda: ops.softmax(logits, 1),
        "clamp": lambda: ops.clamp(logits, 0.0, 1.0),
    }[end]()
    return ov.Model([rows], [pixels], "scored")


def score(colour: tuple[int, int, int], gain: float) -> np.ndarray:
    """Return what a network scores a picture of one colour (BGR): float64 (3,)."""
    return 1 / (1 + np.exp(-gain * (np.array(colour) / 255 - BIAS)))


def average_score(colour: tuple[int, int, int], weights: Mapping[str, float]) -> np.ndarray:
    """Return the weighted mean of the members' scores."""
    total = sum(weights.values())
    parts = [score(colour, GAINS[name]) * (weight / total) for name, weight in weights.items()]
    return np.sum(parts, axis=0)


def scored_picture(name: str, side: int = 24) -> bytes:
    return cv2.imencode(".png", np.full((side, side, 3), PICTURES[name][0], np.uint8))[1].tobytes()


def write_scored_set(folder, precision="INT8", weights=None, **manifest):
    """Write a multi-label set of two members, ``GAINS``, with golden answers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n", "utf-8")
    members = tuple(
        MemberRecord(
            name=name,
            weight=(weights or {}).get(name, 1.0),
            source="made in code",
            networks={precision: save_model(scored_model(gain), folder, name)},
        )
        for name, gain in GAINS.items()
    )
    facts: dict[str, Any] = {
        "name": "scored",
        "description": "colours that a picture has",
        "image": ImageRecord(input_size=SIZE, resize_shorter=SIZE),
        "task": "multi_label",
        "num_classes": len(LABELS),
        "labels": FileRecord.of(folder, "labels.txt"),
        "members": members,
    }
    write_manifest(folder, Manifest.model_validate(facts | manifest))
    record_golden(folder)
    return folder


def write_scored_images(folder: Path, num_per_picture: int = 4) -> Path:
    """Write pictures of ``PICTURES`` and the list of their labels: ``images.csv``, returned."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["file,labels"]
    rng = np.random.default_rng(3)
    for name, (colour, labels) in PICTURES.items():
        for index in range(num_per_picture):
            noise = rng.integers(-9, 10, (24, 24, 3))
            pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
            path = folder / f"{name}{index}.png"
            path.write_bytes(cv2.imencode(".png", pixels)[1].tobytes())
            lines.append(f"{path.name},{';'.join(labels)}")
    (folder / "images.csv").write_text("\n".join(lines) + "\n", "utf-8")
    return folder / "images.csv"
