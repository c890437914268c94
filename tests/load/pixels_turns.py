"""Compares what pixels cost in two checkouts: ``python tests/load/pixels_turns.py PHOTOS``.

``--base`` is the other checkout, with a .venv of its own; they take turns. Prints JSON: CPU-ms a
photo of each, and the base's as a multiple of ours (over 1: ours is faster). Of each photo the
least of all turns and passes counts; means over photos are compared.
"""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

HERE = Path(__file__).parents[2]
SUFFIXES = (".jpg", ".jpeg")
PASSES = 3  # of a photo, in each turn
TARGET = 0.98


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    base: Annotated[Path | None, typer.Option(help="the checkout to compare with")] = None,
    number: Annotated[int, typer.Option(help="of photos", min=1)] = 100,
    turns: Annotated[int, typer.Option(min=1)] = 6,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Measure both checkouts; without --base print this one's times, as a turn does."""
    files = sorted(path for path in photos.rglob("*") if path.suffix.lower() in SUFFIXES)
    if base is None:
        typer.echo(json.dumps(measured([path.read_bytes() for path in files[:number]])))
        return
    from machine import describe
    from result_file import write_result

    checkouts = {"base": base, "ours": HERE}
    least: dict[str, dict[str, list[float]]] = {}
    for turn in range(turns):
        for name in sorted(checkouts, reverse=turn % 2 == 1):
            for way, times in _turn(checkouts[name], photos, number).items():
                before = least.setdefault(way, {}).get(name, times)
                least[way][name] = [min(pair) for pair in zip(before, times, strict=True)]
    result: dict[str, Any] = {**describe(), "base": _commit(base), "photos": number, "turns": turns}
    for way, of_each in least.items():
        means = {name: float(np.mean(times)) for name, times in of_each.items()}
        result[way] = {
            "cpu_ms_of_base": round(means["base"], 4),
            "cpu_ms_of_ours": round(means["ours"], 4),
            "speed_of_ours": round(means["base"] / means["ours"], 3),
        }
    result["target"] = TARGET
    write_result(result, json_file)


def measured(files: list[bytes]) -> dict[str, list[float]]:
    """Return CPU-ms of each file by way, on one thread."""
    import cv2

    from models import image_resize
    from models.image import ImageRule, read_image

    cv2.setNumThreads(1)
    source: Any = getattr(image_resize, "CropSource", None) or vars(image_resize)["Source"]
    usual = ImageRule(input_size=224, resize_shorter=256)
    small = ImageRule(input_size=35, resize_shorter=40)  # reduces nearly every photo
    bundled = ImageRule(input_size=128, resize_shorter=146)
    whole = [cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) for data in files]
    pngs = [cv2.imencode(".png", pixels)[1].tobytes() for pixels in whole]
    webps = [_as_webp(data) for data in files]

    def resized(pixels: Any, size: int, kind: Any) -> Any:
        height, width = pixels.shape[:2]
        y, x = (image_resize.Axis(side, side / size, 0, size, kind) for side in (height, width))
        rows, columns = image_resize.common_region([(y, x)])
        return source(pixels[rows, columns], rows.start, columns.start).resize(y, x)

    ways: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "read_image, JPEG, 224 px": (lambda data: read_image(data, usual), files),
        "read_image, JPEG, 128 px": (lambda data: read_image(data, bundled), files),
        "read_image, JPEG, 35 px": (lambda data: read_image(data, small), files),
        "read_image, PNG, 224 px": (lambda data: read_image(data, usual), pngs),
        "read_image, WebP, 224 px": (lambda data: read_image(data, usual), webps),
        "resize, bilinear, 224 px": (lambda pixels: resized(pixels, 224, "bilinear"), whole),
        "resize, bicubic, 224 px": (lambda pixels: resized(pixels, 224, "bicubic"), whole),
        "resize, bilinear, 32 px": (lambda pixels: resized(pixels, 32, "bilinear"), whole),
    }
    return {
        name: [_least_ms(way, given) for given in inputs] for name, (way, inputs) in ways.items()
    }


def _as_webp(data: bytes) -> bytes:
    from PIL import Image

    written = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("RGB").save(written, "WEBP", quality=80, method=0)
    return written.getvalue()


def _least_ms(way: Callable[[Any], Any], given: Any) -> float:
    least = float("inf")
    for _ in range(PASSES):
        started = time.process_time()
        way(given)
        least = min(least, time.process_time() - started)
    return least * 1e3


def _turn(checkout: Path, photos: Path, number: int) -> dict[str, list[float]]:
    """Measure in a process of the checkout's own interpreter, and so of its own code."""
    line = [str(checkout / ".venv/bin/python"), __file__, str(photos), "--number", str(number)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(line, stdout=subprocess.PIPE, check=True, cwd=checkout, env=environment)
    times: dict[str, list[float]] = json.loads(done.stdout)
    return times


def _commit(checkout: Path) -> str:
    line = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    typer.run(main)
