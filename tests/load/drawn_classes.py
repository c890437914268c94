"""Pictures for the tiny networks, each with the answer that the networks give in process."""

from dataclasses import dataclass
from pathlib import Path

import cv2
import machine  # noqa: F401 (makes tests.support importable)
import numpy as np

from models.ensemble import average, tempered
from models.image import read_image
from models.model_set import load_model_set
from models.openvino_network import CompiledNetwork, RuntimeOptions
from tests.support.tiny_networks import write_tiny_set

SIDE = 320  # px: with noise some 60 KB, as a small photo has


@dataclass(frozen=True)
class Picture:
    """An image file and what a right answer says of it."""

    data: bytes  # JPEG
    probabilities: dict[str, float]  # by label, of the ensemble
    members: tuple[str, ...]  # all that must have answered


def tiny_set(folder: Path, size: int = 64, num_convolutions: int = 8) -> Path:
    """Write a model set, as it is one whose networks take some 3 ms an image."""
    return write_tiny_set(folder, size=size, num_convolutions=num_convolutions)


def draw(model_set: Path, number: int, side: int = SIDE) -> list[Picture]:
    loaded = load_model_set(str(model_set))
    manifest = loaded.manifest
    weights = {member.name: member.weight for member in manifest.members}
    options = RuntimeOptions(batch_sizes=(1,))
    networks = {n: CompiledNetwork(loaded.network_path(n), options) for n in weights}
    own = manifest.temperatures
    rng = np.random.default_rng(5)
    pictures = []
    for _ in range(number):
        noise = rng.integers(0, 128, (side, side, 3)) + rng.integers(0, 128, 3)  # (H, W, 3) BGR
        data = cv2.imencode(".jpg", noise.astype(np.uint8))[1].tobytes()
        image = read_image(data, manifest.image.rule)[np.newaxis]
        rows = {n: tempered(net.predict(image), own[n]) for n, net in networks.items()}
        row = average(rows, weights, manifest.temperature)[0]
        named = dict(zip(loaded.labels, map(float, row), strict=True))
        pictures.append(Picture(data, named, tuple(weights)))
    return pictures
