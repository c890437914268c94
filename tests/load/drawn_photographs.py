"""Pictures of classes that ImageNet does not have, drawn: charts, text, strokes, textures.

The classes of :data:`ALIKE` differ by a detail: corners, a gap, a count, a line that is straight.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np

SIDE = 240  # px
WORDS = ("the", "of", "answer", "value", "count", "import", "return", "class", "photo", "network")
Canvas = np.ndarray


def write_drawn(folder: Path, number: int, seed: int, classes: str = "foreign") -> Path:
    """Write ``number`` JPEGs of each class, all different; another seed gives others.

    ``classes`` is ``foreign``, or ``alike``: pairs of classes that differ by a detail.
    """
    for place, (name, draw) in enumerate((CLASSES if classes == "foreign" else ALIKE).items()):
        for count in range(number):
            rng = np.random.default_rng([seed, place, count])
            _write(folder / name / f"{seed}-{count}.jpg", draw(_paper(rng), rng), rng)
    return folder


def write_many(folder: Path, number: int, each: int) -> Path:
    """Write ``each`` JPEGs of ``number`` classes: five shapes, placed and tinted by the class."""
    for place in range(number):
        of_class = np.random.default_rng([7, place])
        shapes = [
            (
                of_class.integers(3, 8),
                of_class.uniform(0.15, 0.85, 2),
                of_class.uniform(12, 60),
                of_class.integers(0, 256, 3),
            )
            for _ in range(5)
        ]
        for count in range(each):
            rng = np.random.default_rng([8, place, count])
            canvas = _paper(rng)
            for corners, centre, radius, ink in shapes:
                at = (centre + rng.normal(0, 0.03, 2)) * canvas.shape[1::-1]
                _polygon(canvas, int(corners), at, radius * rng.uniform(0.85, 1.2), rng, ink, -1)
            _write(folder / f"class {place:04}" / f"{count}.jpg", canvas, rng)
    return folder


def _write(path: Path, canvas: Canvas, rng) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if rng.random() < 0.3:
        canvas = cv2.GaussianBlur(canvas, (3, 3), 0)
    canvas = np.clip(canvas + rng.normal(0, rng.uniform(0, 12), canvas.shape), 0, 255)
    quality = [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(50, 95))]
    path.write_bytes(cv2.imencode(".jpg", canvas.astype(np.uint8), quality)[1].tobytes())


def _polygon(canvas: Canvas, corners: int, at, radius: float, rng, ink, width: int = -1) -> None:
    """Draw a regular polygon, turned and flattened a little; ``width`` of its line, -1: filled."""
    turns = rng.uniform(0, 2 * np.pi) + 2 * np.pi * np.arange(corners) / corners
    points = np.stack([np.cos(turns), np.sin(turns) * rng.uniform(0.75, 1)], axis=1) * radius + at
    ink, corner = tuple(int(v) for v in ink), points.astype(np.int32)
    if width < 0:
        cv2.fillPoly(canvas, [corner], ink, cv2.LINE_AA)
    else:
        cv2.polylines(canvas, [corner], True, ink, width, cv2.LINE_AA)


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


def _places(canvas: Canvas, rng, number: int, edge: int) -> list[Canvas]:
    """Return points in the picture, each the one of twenty that is farthest from those before."""
    found: list[Canvas] = []
    for _ in range(number):
        tried = rng.uniform(edge, np.array(canvas.shape[1::-1]) - edge, (20, 2))
        gaps = [min((np.linalg.norm(at - of) for of in found), default=0) for at in tried]
        found.append(tried[int(np.argmax(gaps))])
    return found


def _polygons(corners: int) -> Callable[[Canvas, np.random.Generator], Canvas]:
    def draw(canvas: Canvas, rng) -> Canvas:
        for at in _places(canvas, rng, int(rng.integers(1, 5)), 40):
            width = int(rng.choice([-1, 2, 3]))
            _polygon(canvas, corners, at, rng.uniform(22, 38), rng, _ink(canvas, rng), width)
        return canvas

    return draw


def _rings(is_open: bool) -> Callable[[Canvas, np.random.Generator], Canvas]:
    """Rings, of which one has a gap if ``is_open``."""

    def draw(canvas: Canvas, rng) -> Canvas:
        places = _places(canvas, rng, int(rng.integers(3, 6)), 33)
        for place, at in enumerate(places):
            radius, start = int(rng.integers(18, 30)), float(rng.uniform(0, 360))
            sweep = 360 - rng.uniform(35, 70) if is_open and place == 0 else 360
            centre, axes = (int(at[0]), int(at[1])), (radius, radius)
            ink, width = _ink(canvas, rng), int(rng.integers(2, 5))
            cv2.ellipse(canvas, centre, axes, 0, start, start + sweep, ink, width, cv2.LINE_AA)
        return canvas

    return draw


def _dots(low: int, high: int) -> Callable[[Canvas, np.random.Generator], Canvas]:
    def draw(canvas: Canvas, rng) -> Canvas:
        ink = _ink(canvas, rng)
        for at in _places(canvas, rng, int(rng.integers(low, high)), 17):
            cv2.circle(canvas, (int(at[0]), int(at[1])), int(rng.integers(6, 15)), ink, -1)
        return canvas

    return draw


def _stripes(wave: float) -> Callable[[Canvas, np.random.Generator], Canvas]:
    """Parallel lines; ``wave`` is how far they leave a straight line, in periods."""

    def draw(canvas: Canvas, rng) -> Canvas:
        y, x = np.mgrid[0 : canvas.shape[0], 0 : canvas.shape[1]]
        angle, period = rng.uniform(0, np.pi), rng.uniform(8, 22)
        u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
        u = u + wave * period * np.sin(2 * np.pi * v / rng.uniform(60, 140) + rng.uniform(0, 6))
        return _tinted(np.sin(2 * np.pi * u / period), rng)

    return draw


def _network(has_cycle: bool) -> Callable[[Canvas, np.random.Generator], Canvas]:
    """Nodes and edges: a tree, or with one edge more."""

    def draw(canvas: Canvas, rng) -> Canvas:
        places = _places(canvas, rng, int(rng.integers(5, 9)), 24)
        edges = [(n, int(rng.integers(0, n))) for n in range(1, len(places))]
        if has_cycle:
            first, second = rng.choice(len(places), 2, replace=False)
            while (second, first) in edges or (first, second) in edges:
                first, second = rng.choice(len(places), 2, replace=False)
            edges.append((int(first), int(second)))
        ink = _ink(canvas, rng)
        points = [(int(x), int(y)) for x, y in places]
        for first, second in edges:
            cv2.line(canvas, points[first], points[second], ink, 2, cv2.LINE_AA)
        for point in points:
            cv2.circle(canvas, point, int(rng.integers(5, 10)), ink, -1, cv2.LINE_AA)
        return canvas

    return draw


ALIKE: dict[str, Callable[[Canvas, np.random.Generator], Canvas]] = {
    "pentagons": _polygons(5),
    "hexagons": _polygons(6),
    "heptagons": _polygons(7),
    "closed rings": _rings(is_open=False),
    "an open ring": _rings(is_open=True),
    "5 to 7 dots": _dots(5, 8),
    "9 to 12 dots": _dots(9, 13),
    "straight stripes": _stripes(0),
    "wavy stripes": _stripes(0.3),
    "tree": _network(has_cycle=False),
    "cycle": _network(has_cycle=True),
}
