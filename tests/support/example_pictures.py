"""Draws the page's example pictures: ``python -m tests.support.example_pictures``.

A golf ball and a parachute, since the bundled set and ImageNet's know both. OpenCV draws what NumPy
shades; colours are BGR.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import numpy as np

Pixels = Any  # (H, W, 3) float32 BGR while drawn
PAGE = Path(__file__).parents[2] / "app" / "http" / "page"
DRAWN, SIDE, QUALITY = 480, 320, 82
RED, WHITE, LINE = (40, 40, 210), (245, 245, 245), (70, 70, 70)


def noise(rng: np.random.Generator, step: int, amplitude: float) -> Any:
    """Return smooth noise (H, W); ``step`` is the size of its spots in px."""
    small = rng.normal(size=(DRAWN // step, DRAWN // step))
    return cv2.resize(small, (DRAWN, DRAWN), interpolation=cv2.INTER_CUBIC) * amplitude


def blade(rng: np.random.Generator, image: Pixels, root: Any, length: float, width: int) -> None:
    angle = rng.normal(0, 0.45)
    color = np.array((38, 120, 72)) + rng.normal(0, 22) + (0, *rng.normal(10, 16, 2))
    tip = (int(root[0] + length * np.sin(angle)), int(root[1] - length * np.cos(angle)))
    cv2.line(image, (int(root[0]), int(root[1])), tip, color.tolist(), width, cv2.LINE_AA)


def golf_ball(rng: np.random.Generator) -> Pixels:
    image: Pixels = np.full((DRAWN, DRAWN, 3), (45, 125, 80), np.float32)
    for x, y in rng.integers(0, DRAWN, (9000, 2)):
        blade(rng, image, (x, y), 3 + 18 * (0.4 + 0.6 * y / DRAWN), 1)
    image = cv2.GaussianBlur(image, (0, 0), 1.2)
    x, y, radius = 250, 250, 118
    shadow = np.zeros((DRAWN, DRAWN), np.float32)
    cv2.ellipse(shadow, (x + 40, y + radius - 6), (radius, 30), 0, 0, 360, 1, -1)
    image *= 1 - 0.6 * cv2.GaussianBlur(shadow, (0, 0), 14)[..., None]
    rows, columns = np.mgrid[0:DRAWN, 0:DRAWN]
    across, down = (columns - x) / radius, (rows - y) / radius
    is_ball = across**2 + down**2 < 1
    depth = np.sqrt(np.clip(1 - across**2 - down**2, 0, 1))
    normals = np.stack([across, down, depth], -1)[is_ball]  # (N, 3), of length 1
    ball = image.copy()
    ball[is_ball] = np.clip(shaded(dimpled(rng, normals), normals), 0, 255)
    share = cv2.GaussianBlur(is_ball.astype(np.float32), (0, 0), 1.0)[..., None]
    image = image * (1 - share) + ball * share
    for _ in range(260):
        root = (rng.integers(x - radius - 10, x + radius + 10), y + radius + rng.integers(0, 22))
        blade(rng, image, root, float(rng.integers(16, 52)), 2)
    return image + noise(rng, 2, 2.5)[..., None]


def dimpled(rng: np.random.Generator, normals: Any, count: int = 340, size: float = 0.092) -> Any:
    """Return the normals (N, 3) bent by dimples on a Fibonacci lattice; ``size`` in radians."""
    numbers = np.arange(count) + 0.5
    polar, turn = np.arccos(1 - 2 * numbers / count), np.pi * (1 + 5**0.5) * numbers
    centres = np.stack([np.cos(turn) * np.sin(polar), np.sin(turn) * np.sin(polar), np.cos(polar)])
    centres = np.linalg.qr(rng.normal(size=(3, 3)))[0] @ centres
    cosines = normals @ centres
    nearest, cosine = cosines.argmax(1), cosines.max(1)[:, None]
    inward = centres.T[nearest] - normals * cosine
    inward /= np.linalg.norm(inward, axis=1, keepdims=True) + 1e-6
    share = np.arccos(np.clip(cosine, -1, 1)) / size
    bent = normals + np.where(share < 1, 0.62 * np.sin(share * np.pi / 2), 0) * inward
    return bent / np.linalg.norm(bent, axis=1, keepdims=True)


def shaded(bent: Any, normals: Any) -> Any:
    """Return the colours (N, 3) of a white ball above grass, lit from the upper left."""
    light = np.array([-0.45, -0.65, 0.62]) / np.linalg.norm([-0.45, -0.65, 0.62])
    half = light + np.array([0, 0, 1])
    half /= np.linalg.norm(half)
    diffuse, gloss = np.clip(bent @ light, 0, 1), np.clip(bent @ half, 0, 1) ** 40
    ambient = 0.42 - 0.1 * normals[:, 1]
    white = np.array((238, 242, 243)) * (ambient + 0.62 * diffuse)[:, None] + 60 * gloss[:, None]
    return white * 0.97 + np.clip(normals[:, 1:2] - 0.3, 0, 1) * (15, 55, 25)


def parachute(rng: np.random.Generator) -> Pixels:
    share = np.linspace(0, 1, DRAWN)[:, None, None]
    sky = np.array((215, 150, 85)) * (1 - share) + np.array((240, 205, 150)) * share
    image = np.repeat(sky, DRAWN, 1).astype(np.float32)
    clouds = sum(noise(rng, step, height) for step, height in ((120, 14), (60, 8), (25, 4)))
    image += np.clip(clouds, 0, 60)[..., None]
    x, y, wide, high, panels, man = 240, 170, 150, 105, 9, (240, 375)
    angles = np.linspace(0, np.pi / 2, 24)
    edges = [
        np.stack([x + at * wide * np.sin(angles) ** 0.8, y - high * np.cos(angles)], 1)
        for at in np.linspace(-1, 1, panels + 1)
    ]
    for panel, (left, right) in enumerate(pairwise(edges)):
        middle = (left[-1] + right[-1]) / 2 + (0, 14)
        outline = np.concatenate([left, [middle], right[::-1]]).astype(np.int32)
        light = 0.72 + 0.28 * np.cos((2 * panel + 1) / panels * 1.4 - 1)
        color = [value * light for value in (RED, WHITE)[panel % 2]]
        cv2.fillPoly(image, [outline], color, cv2.LINE_AA)
        cv2.polylines(image, [outline], True, (60, 60, 60), 1, cv2.LINE_AA)
    for edge in edges:
        cv2.line(image, edge[-1].astype(int).tolist(), man, LINE, 1, cv2.LINE_AA)
    cv2.ellipse(image, (x, 392), (9, 18), 0, 0, 360, (50, 50, 60), -1, cv2.LINE_AA)
    cv2.circle(image, (x, 370), 8, (90, 120, 170), -1, cv2.LINE_AA)
    for side in (-1, 1):
        cv2.line(image, (x + 3 * side, 406), (x + 9 * side, 432), (40, 40, 50), 5, cv2.LINE_AA)
    return cv2.GaussianBlur(image, (0, 0), 0.8) + noise(rng, 1, 2)[..., None]


def main() -> None:
    for name, draw in (("golf-ball", golf_ball), ("parachute", parachute)):
        pixels = np.clip(draw(np.random.default_rng(3)), 0, 255).astype(np.uint8)
        small = cv2.resize(pixels, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        cv2.imwrite(str(PAGE / f"{name}.jpg"), small, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])


if __name__ == "__main__":
    main()
