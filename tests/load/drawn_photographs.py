"""Pictures of eight classes that ImageNet does not have, drawn: charts, text, strokes, textures."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np

SIDE = 240  # px
WORDS = ("the", "of", "answer", "value", "count", "import", "return", "class", "photo", "network")
Canvas = np.ndarray


def write_drawn(folder: Path, number: int, seed: int) -> Path:
    """Write ``number`` JPEGs of each class, all different; another seed gives others."""
    for place, (name, draw) in enumerate(CLASSES.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for count in range(number):
            rng = np.random.default_rng([seed, place, count])
            canvas = draw(_paper(rng), rng)
            if rng.random() < 0.3:
                canvas = cv2.GaussianBlur(canvas, (3, 3), 0)
            canvas = np.clip(canvas + rng.normal(0, rng.uniform(0, 12), canvas.shape), 0, 255)
            quality = [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(50, 95))]
            content = cv2.imencode(".jpg", canvas.astype(np.uint8), quality)[1]
            (folder / name / f"{seed}-{count}.jpg").write_bytes(content.tobytes())
    return folder


def _paper(rng) -> Canvas:
    level = rng.integers(200, 256, 3) if rng.random() < 0.8 else rng.integers(10, 70, 3)
    return np.full((SIDE, int(rng.integers(SIDE, 340)), 3), level, np.uint8)


def _ink(canvas: Canvas, rng) -> tuple[int, ...]:
    is_light = canvas[0, 0].mean() > 128
    return tuple(int(v) for v in rng.integers(0, 110, 3) + (0 if is_light else 140))


def _axes(canvas: Canvas, rng) -> None:
    height, width = canvas.shape[:2]
    if rng.random() < 0.8:
        ink = _ink(canvas, rng)
        cv2.line(canvas, (24, 12), (24, height - 24), ink, 1)
        cv2.line(canvas, (24, height - 24), (width - 12, height - 24), ink, 1)


def _bars(canvas: Canvas, rng) -> Canvas:
    _axes(canvas, rng)
    height, width = canvas.shape[:2]
    edges = np.linspace(30, width - 16, int(rng.integers(4, 14))).astype(int)
    ink = _ink(canvas, rng)
    for left, right in pairwise(edges):
        ink = _ink(canvas, rng) if rng.random() < 0.3 else ink
        top = int(rng.integers(20, height - 40))
        cv2.rectangle(canvas, (int(left), top), (int(right) - 4, height - 25), ink, -1)
    return canvas


def _lines(canvas: Canvas, rng) -> Canvas:
    _axes(canvas, rng)
    height, width = canvas.shape[:2]
    for _ in range(int(rng.integers(1, 5))):
        x = np.linspace(26, width - 14, int(rng.integers(6, 40)))
        y = height / 2 + np.cumsum(rng.normal(0, 14, len(x)))
        points = np.stack([x, np.clip(y, 14, height - 28)], 1).astype(np.int32)
        cv2.polylines(canvas, [points], False, _ink(canvas, rng), int(rng.integers(1, 4)))
    return canvas


def _pie(canvas: Canvas, rng) -> Canvas:
    height, width = canvas.shape[:2]
    centre = int(width / 2 + rng.integers(-30, 30)), int(height / 2 + rng.integers(-15, 15))
    ends = np.sort(np.r_[0, rng.uniform(0, 360, int(rng.integers(2, 8))), 360])
    radius = int(rng.integers(50, 100))
    for start, end in pairwise(ends):
        ink = tuple(int(v) for v in rng.integers(0, 256, 3))
        cv2.ellipse(canvas, centre, (radius, radius), 0, float(start), float(end), ink, -1)
    return canvas


def _text(canvas: Canvas, rng, indents: bool = False) -> Canvas:
    scale, ink = rng.uniform(0.35, 0.7), _ink(canvas, rng)
    step, indent = int(34 * scale + 6), 0
    for top in range(step, SIDE, step):
        indent = max(0, indent + int(rng.integers(-1, 2)) * 20) if indents else 0
        words = rng.choice(WORDS, int(rng.integers(1, 4 if indents else 12)))
        line = " ".join(words) + ("():" if indents and rng.random() < 0.4 else "")
        if indents:
            ink = _ink(canvas, rng) if rng.random() < 0.5 else ink
        font = cv2.FONT_HERSHEY_PLAIN if indents else cv2.FONT_HERSHEY_SIMPLEX
        size = scale * (2 if indents else 1)
        cv2.putText(canvas, line, (8 + indent, top), font, size, ink, 1, cv2.LINE_AA)
    return canvas


def _code(canvas: Canvas, rng) -> Canvas:
    return _text(canvas, rng, indents=True)


def _strokes(canvas: Canvas, rng) -> Canvas:
    ink, height = _ink(canvas, rng), int(rng.integers(10, 22))
    for top in range(30, SIDE, int(rng.integers(34, 60))):
        t = np.linspace(0, rng.uniform(20, 50), 400)
        x = 10 + (canvas.shape[1] - 30) * t / t[-1] + height * 0.6 * np.sin(1.7 * t)
        y = top + height * np.sin(t + np.cumsum(rng.normal(0, 0.15, len(t))))
        pen_up = np.cumsum(rng.random(len(t)) < 0.02)
        for word in np.unique(pen_up):
            points = np.stack([x, y], 1)[pen_up == word].astype(np.int32)
            cv2.polylines(canvas, [points], False, ink, int(rng.integers(1, 3)), cv2.LINE_AA)
    return canvas


def _weave(canvas: Canvas, rng) -> Canvas:
    y, x = np.mgrid[0 : canvas.shape[0], 0 : canvas.shape[1]]
    angle, period = rng.uniform(0, np.pi), rng.uniform(4, 16)
    u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    level = np.sin(2 * np.pi * u / period) * np.sin(2 * np.pi * v / (period * rng.uniform(0.5, 2)))
    return _tinted(level, rng)


def _stone(canvas: Canvas, rng) -> Canvas:
    level = np.zeros(canvas.shape[:2])
    for step in (4, 8, 16, 32, 64):
        small = rng.normal(0, 1, (canvas.shape[0] // step + 2, canvas.shape[1] // step + 2))
        grown = cv2.resize(small, canvas.shape[1::-1], interpolation=cv2.INTER_CUBIC)
        level += grown * step ** rng.uniform(0.3, 0.9)
    return _tinted(level / np.abs(level).max(), rng)


def _tinted(level, rng) -> Canvas:
    dark, light = rng.uniform(0, 120, 3), rng.uniform(120, 255, 3)
    share = (level[..., None] + 1) / 2
    return np.asarray(dark + (light - dark) * share)


CLASSES: dict[str, Callable[[Canvas, np.random.Generator], Canvas]] = {
    "bar chart": _bars,
    "line chart": _lines,
    "pie chart": _pie,
    "text": _text,
    "code": _code,
    "strokes": _strokes,
    "weave": _weave,
    "stone": _stone,
}
