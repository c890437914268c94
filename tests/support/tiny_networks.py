"""Model sets made in code, so small that a test builds, hashes and compiles one in milliseconds.

A tiny network has one class per colour channel: its probabilities are the softmax of the picture's
mean blue, green and red. What a picture must be called is therefore known without running anything.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import openvino as ov
from openvino import opset13 as ops

from calibration.sets.transaction import change, write_manifest
from calibration.statistics import Paired
from models.manifest import Manifest, MemberRecord, Network, read_manifest
from models.record import AccuracyRecord, Drop, FileRecord, ImageRecord, Precision, Score

LABELS = ("mostly blue", "mostly green", "mostly red")
COLORS = {"blue": (255, 0, 0), "green": (0, 255, 0), "red": (0, 0, 255)}  # BGR
SIZE = 16  # px, the networks' input


def picture(color: str = "green", side: int = 24, suffix: str = ".png") -> bytes:
    return cv2.imencode(suffix, np.full((side, side, 3), COLORS[color], np.uint8))[1].tobytes()


def expected_label(color: str) -> str:
    return f"mostly {color}"


def tiny_model(size=SIZE, gain=4.0, num_convolutions=0, order=range(3)):
    """u8 [?,size,size,3] -> softmax of ``gain`` x mean colour (0..1); convolutions take time.

    ``order``: which colour each class is.
    """
    pixels = ops.parameter([-1, size, size, 3], ov.Type.u8, name="pixels")
    scaled = ops.multiply(ops.convert(pixels, "f32"), np.float32(1 / 255))
    means = ops.reduce_mean(scaled, np.array([1, 2]), keep_dims=False)  # (N, 3)
    if num_convolutions:
        means = ops.add(means, _busy_work(scaled, num_convolutions))
    logits = ops.matmul(means, np.eye(3, dtype=np.float32)[:, list(order)] * gain, False, False)
    return ov.Model([ops.softmax(logits, 1)], [pixels], "tiny")


def _busy_work(scaled: ov.Node, num_convolutions: int) -> ov.Node:
    """Return almost-zeros (N, 3) that cost ``num_convolutions`` convolutions."""
    rng = np.random.default_rng(0)
    features = ops.transpose(scaled, np.array([0, 3, 1, 2]))
    for index in range(num_convolutions):
        kernel = rng.normal(0, 0.05, (32, 3 if index == 0 else 32, 3, 3)).astype(np.float32)
        features = ops.relu(ops.convolution(features, kernel, [1, 1], [1, 1], [1, 1], [1, 1]))
    mean = ops.reduce_mean(features, np.array([1, 2, 3]), keep_dims=False)  # (N,)
    return ops.unsqueeze(ops.multiply(mean, np.float32(1e-9)), 1)


def save_model(model: ov.Model, folder: Path, stem: str) -> Network:
    """Write the IR and describe it as the manifest does."""
    ov.save_model(model, folder / f"{stem}.xml", compress_to_fp16=False)
    return Network(
        xml=FileRecord.of(folder, f"{stem}.xml"), bin=FileRecord.of(folder, f"{stem}.bin")
    )


def write_tiny_set(
    folder: Path,
    *,
    gains: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
    num_convolutions: int = 0,
    size: int = SIZE,
    images: Mapping[str, ImageRecord] | None = None,
    precision: Precision = "INT8",
    order: Sequence[int] = range(3),
    **manifest: Any,
) -> Path:
    """Write a whole model set into ``folder``; one member per entry of ``gains``.

    ``images``: of members that take another input than ``size``; ``order``: of the labels.
    """
    folder.mkdir(parents=True, exist_ok=True)
    gains = gains or {"sure": 8.0, "unsure": 2.0}
    labels = [LABELS[place] for place in order]
    (folder / "labels.txt").write_text("\n".join(labels) + "\n", "utf-8")
    members = []
    for name, gain in gains.items():
        image = (images or {}).get(name)
        own = image.input_size if image else size
        network = save_model(tiny_model(own, gain, num_convolutions, order), folder, name)
        members.append(
            MemberRecord(
                name=name,
                weight=(weights or {}).get(name, 1.0),
                source="made in code",
                networks={precision: network},
                image=image,
            )
        )
    facts: dict[str, Any] = {
        "name": "tiny",
        "description": "three colours",
        "image": ImageRecord(input_size=size, resize_shorter=size),
        "num_classes": len(LABELS),
        "labels": FileRecord.of(folder, "labels.txt"),
        "members": tuple(members),
    }
    write_manifest(folder, Manifest.model_validate(facts | manifest))
    return folder


def with_accuracy(manifest, top1, drops=None, **changes):
    """Add an accuracy record of the manifest's own networks, as if it had been measured.

    Where INT8 lost something, float was right on so many images more, and INT8 nowhere else.
    """
    num_images = changes.get("num_images", 4000)
    scores = {
        name: Score(top1=value, top1_interval=(0.0, 1.0), top5=1.0, calibration_error=0.0)
        for name, value in top1.items()
    }
    facts: dict[str, Any] = {
        "dataset": "colours/eval",
        "images_sha256": "0" * 64,
        "num_images": num_images,
        "measured": "2026-01-01",
        "cpu": "a CPU",
        "int8_kernels": "kernels",
        "float_type": {"INT8": "f32"},
        "versions": {},
        "fingerprints": {
            m.name: {p: n.fingerprint for p, n in m.networks.items()} for m in manifest.members
        },
        "conditions": manifest.conditions,
        "scores": {"INT8": scores},
        "drops": {name: drop_of(value, num_images) for name, value in (drops or {}).items()},
    }
    record = AccuracyRecord.model_validate(facts | changes)
    return manifest.model_copy(update={"accuracy": (*manifest.accuracy, record)})


def drop_of(value: float, num_images: int) -> Drop:
    """Return a drop of ``value``, a fraction, with the fewest images that it can be made of."""
    number = round(abs(value) * num_images)
    pair = Paired(num_images, *((number, 0) if value > 0 else (0, number)))
    return pair.drop.model_copy(update={"top1": value})


def record_golden(folder: Path) -> None:
    with change(folder) as staging:
        manifest = read_manifest(folder)
        staging.move_in(manifest.model_copy(update={"golden": staging.golden(manifest)}))


def write_opposite_sets(folder: Path) -> tuple[Path, Path]:
    """Write two sets with golden answers whose networks never answer alike."""
    one, two = (
        write_tiny_set(folder / name, gains={"sure": gain})
        for name, gain in (("one", 8.0), ("two", -8.0))
    )
    record_golden(one)
    record_golden(two)
    return one, two


def take_golden(folder: Path, other: Path) -> None:
    """Give a set the golden answers of another, hashes all right."""
    (folder / "golden.json").write_bytes((other / "golden.json").read_bytes())
    update = {"golden": read_manifest(other).golden}
    write_manifest(folder, read_manifest(folder).model_copy(update=update))


def write_pictures(folder: Path, num_per_color: int = 4, side: int = 24) -> Path:
    """Write an ImageFolder whose folders are the labels; every picture is different, and right."""
    rng = np.random.default_rng(5)
    for color in COLORS:
        place = folder / expected_label(color)
        place.mkdir(parents=True, exist_ok=True)
        for index in range(num_per_color):
            noise = rng.integers(0, 60, (side, side, 3))
            pixels = np.clip(np.array(COLORS[color]) * 0.7 + noise, 0, 255).astype(np.uint8)
            (place / f"{index}.png").write_bytes(cv2.imencode(".png", pixels)[1].tobytes())
    return folder


def fragile_model(size: int = SIZE) -> ov.Model:
    """u8 [?,size,size,3] -> the tiny network's answer, by a way that eight bits cannot go.

    One feature is 20,000 times larger than the three that decide: in the steps of its range the
    others are all zero. Kept float, the second convolution answers as if nothing were there.
    """
    pixels = ops.parameter([-1, size, size, 3], ov.Type.u8, name="pixels")
    scaled = ops.multiply(ops.convert(pixels, "f32"), np.float32(1 / 255))
    planes = ops.transpose(scaled, np.array([0, 3, 1, 2]))
    spread = np.zeros((4, 3, 1, 1), np.float32)
    spread[:3, :, 0, 0] = np.eye(3)
    spread[3, :, 0, 0] = 20_000
    gather = np.zeros((3, 4, 1, 1), np.float32)
    gather[:, :3, 0, 0] = np.eye(3) * 8
    features = ops.relu(_convolved(planes, spread, "spread"))
    logits = ops.reduce_mean(_convolved(features, gather, "gather"), np.array([2, 3]), False)
    return ov.Model([ops.softmax(logits, 1)], [pixels], "fragile")


def _convolved(source: ov.Node, kernel: np.ndarray, name: str) -> ov.Node:
    node = ops.convolution(source, kernel, [1, 1], [0, 0], [0, 0], [1, 1])
    node.set_friendly_name(name)
    return node
