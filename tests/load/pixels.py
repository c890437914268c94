"""What the pixel path costs, and its distance from Pillow: ``python tests/load/pixels.py DIR``.

Prints JSON: CPU-ms per photo of decoding alone, of the whole function, and of Pillow doing it;
differences (levels of 255) from Pillow's antialiased resize for our resize and for OpenCV's, and of
reduced-scale decoding from full decoding.
"""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import cv2
import numpy as np
import typer
from machine import describe
from PIL import Image, ImageOps
from result_file import write_result

from models import image as image_module
from models.image import ImageRule, read_image
from models.runtime import Pixels

RULE = ImageRule(input_size=224, resize_shorter=256)
SMALL_RULE = ImageRule(input_size=35, resize_shorter=40)  # reduces nearly every photo


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    passes: Annotated[int, typer.Option(help="the best of so many counts", min=1)] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Measure time and parity on real photos."""
    cv2.setNumThreads(1)
    files = [path.read_bytes() for path in sorted(photos.rglob("*.JPEG"))]
    reference = [pillow(data) for data in files]
    ways: dict[str, Callable[[bytes], Any]] = {
        "imdecode alone": lambda d: cv2.imdecode(np.frombuffer(d, np.uint8), cv2.IMREAD_COLOR),
        "read_image": lambda d: read_image(d, RULE),
        "imdecode, INTER_AREA, crop": lambda d: opencv(d, cv2.INTER_AREA),
        "imdecode, INTER_LINEAR, crop": lambda d: opencv(d, cv2.INTER_LINEAR),
        "Pillow": pillow,
    }
    result = {
        **describe(),
        "photos": len(files),
        "rule": {"input_size": RULE.input_size, "resize_shorter": RULE.resize_shorter},
        "cpu_ms_per_photo": {name: _best_ms(way, files, passes) for name, way in ways.items()},
        "difference_from_pillow": {
            name: _difference([ways[name](data) for data in files], reference)
            for name in list(ways)[1:-1]
        },
        "reduced_decoding_at_40_px": _reduced(files),
    }
    write_result(result, json_file)


def pillow(data: bytes) -> Pixels:
    """Do what torchvision's classification presets do, in Pillow; uint8 BGR."""
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    resized = picture.resize(_resized_size(*picture.size), Image.Resampling.BILINEAR)
    return _centre(np.asarray(resized)[:, :, ::-1])


def opencv(data: bytes, interpolation: int) -> Pixels:
    """Do the same with one of OpenCV's own interpolations."""
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert pixels is not None
    size = _resized_size(pixels.shape[1], pixels.shape[0])
    return _centre(np.asarray(cv2.resize(pixels, size, interpolation=interpolation), np.uint8))


def _resized_size(width: int, height: int) -> tuple[int, int]:
    """Return torchvision's sizes: the shorter side exactly, the longer one rounded down."""
    short = min(width, height)
    return RULE.resize_shorter * width // short, RULE.resize_shorter * height // short


def _centre(pixels: Pixels) -> Pixels:
    top, left = (round((side - RULE.input_size) / 2) for side in pixels.shape[:2])
    return pixels[top : top + RULE.input_size, left : left + RULE.input_size]


def _best_ms(way: Callable[[bytes], Any], files: list[bytes], passes: int) -> float:
    best = float("inf")
    for _ in range(passes):
        started = time.process_time()
        for data in files:
            way(data)
        best = min(best, time.process_time() - started)
    return round(best / len(files) * 1e3, 3)


def _difference(found: list[Pixels], expected: list[Pixels]) -> dict[str, float]:
    pairs = zip(found, expected, strict=True)
    gaps = np.stack([np.abs(a.astype(np.int16) - b) for a, b in pairs])
    return {
        "mean": round(float(gaps.mean()), 3),
        "p99.9": float(np.percentile(gaps, 99.9)),
        "largest": int(gaps.max()),
    }


def _reduced(files: list[bytes]) -> dict[str, float]:
    """Compare with the same function when it is kept from reducing."""
    reduced = [read_image(data, SMALL_RULE) for data in files]
    chosen = image_module._choose_reduction
    image_module._choose_reduction = lambda header, rule: 1
    try:
        full = [read_image(data, SMALL_RULE) for data in files]
    finally:
        image_module._choose_reduction = chosen
    return _difference(reduced, full)


if __name__ == "__main__":
    typer.run(main)
