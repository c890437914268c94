"""What 32 regions of a 12-megapixel photograph cost, next to 32 requests of it.

    python tests/load/regions.py PHOTOS --json FILE

PHOTOS has a folder for each class. Photographs are enlarged to 12 megapixels with grain, as
shrinking.py does. ``tandem serve`` answers, in turns: one request with 32 regions; 32 requests of
the photograph; and 32 requests of the regions as JPEG files, which somebody had to decode and crop
before. Each turn's wall time and CPU time of all processes of the service are measured.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import cv2
import httpx
import numpy as np
import typer
from machine import cpu_seconds, describe, process_tree, write_result
from running import running_service
from shrinking import enlarged, photographs

COLUMNS, ROWS = 8, 4
SETTLED_S = 0.3  # after a turn, for CPU time that is counted late


def grid(width: int, height: int) -> list[list[int]]:
    """Return regions of a quarter of each side, evenly over the picture, which overlap."""
    wide, high = width // 4, height // 4
    lefts = np.linspace(0, width - wide, COLUMNS).astype(int).tolist()
    tops = np.linspace(0, height - high, ROWS).astype(int).tolist()
    return [[left, top, wide, high] for top in tops for left in lefts]


def cropped(pixels: np.ndarray, region: list[int]) -> bytes:
    left, top, wide, high = region
    return cv2.imencode(".jpg", pixels[top : top + high, left : left + wide])[1].tobytes()


def main(
    photos: Annotated[Path, typer.Argument(help="a folder a class", exists=True)],
    model_set: Annotated[str, typer.Option(help="name or folder of the set")] = "imagenette",
    turns: Annotated[int, typer.Option(help="photographs, each a turn")] = 6,
    clients: Annotated[int, typer.Option(help="requests under way at a time")] = 1,
    plan: Annotated[str, typer.Option(help="full or fast, for all requests")] = "full",
    json_file: Annotated[Path | None, typer.Option("--json", help="also write it here")] = None,
) -> None:
    """Measure the three ways in turns, print JSON."""
    small = photographs(photos)
    chosen = small[:: max(1, len(small) // (turns + 1))][: turns + 1]
    with (
        running_service("--model-set", model_set) as service,
        httpx.Client(base_url=service.url, timeout=60) as http,
        ThreadPoolExecutor(clients) as threads,
    ):

        def post(data: bytes, **query: str) -> Any:
            asked = {"top_k": "1", "plan": plan, **query}
            response = http.post("/v1/classify", content=data, params=asked)
            return response.raise_for_status().json()

        def measured(call: Callable[[], Any]) -> dict[str, float]:
            processes = process_tree(service.process.pid)
            before, started = cpu_seconds(processes), time.perf_counter()
            call()
            wall_s = time.perf_counter() - started
            time.sleep(SETTLED_S)
            return {
                "wall_ms": round(wall_s * 1e3, 1),
                "cpu_ms": round((cpu_seconds(processes) - before) * 1e3, 1),
            }

        def turn(data: bytes) -> dict[str, dict[str, float]]:
            pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
            assert pixels is not None
            regions = grid(pixels.shape[1], pixels.shape[0])
            crops, asked = [cropped(pixels, region) for region in regions], json.dumps(regions)
            answers = post(data, regions=asked)["results"]
            assert not [row for row in answers if "error" in row], answers
            return {
                "regions": measured(lambda: post(data, regions=asked)),
                "photographs": measured(lambda: list(threads.map(post, [data] * len(regions)))),
                "crops": measured(lambda: list(threads.map(post, crops))),
            }

        files = [enlarged(photo, seed)[1] for seed, photo in enumerate(chosen)]
        rows = [turn(data) for data in files]
    rows = rows[1:]  # the first turn warms up
    write_result(
        {
            "machine": describe(),
            "model_set": model_set,
            "regions": COLUMNS * ROWS,
            "clients": clients,
            "plan": plan,
            "megabytes": round(sum(map(len, files)) / len(files) / 1e6, 2),
            "share_of_photographs": {
                what: round(median(r["regions"][what] / r["photographs"][what] for r in rows), 3)
                for what in ("wall_ms", "cpu_ms")
            },
            "share_of_crops": {
                what: round(median(r["regions"][what] / r["crops"][what] for r in rows), 3)
                for what in ("wall_ms", "cpu_ms")
            },
            "turns": rows,
        },
        json_file,
    )


if __name__ == "__main__":
    typer.run(main)
