"""How fast quantising and evaluating are, and whether memory grows with the images.

``python tests/load/accuracy_tools.py IMAGES CALIBRATION [--out FILE]``: IMAGES an ImageFolder of
the bundled set's classes, CALIBRATION a folder of 300 images or more. Evaluation is compared with
the bound of the same work in one process: every stage alone, in OpenVINO's throughput mode, at its
best batch size; rounds of both take turns.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import openvino as ov
import typer
from machine import describe

from calibration.datasets.labelled import Dataset, read_dataset
from calibration.evaluation.inference import Networks, batches, through_threads
from models.cpus import available_cpus
from models.image import read_image
from models.model_set import ModelSet, load_model_set

TANDEM = Path(sys.executable).with_name("tandem")
BATCH_SIZES = (1, 4, 8)


def main(
    images: Annotated[Path, typer.Argument(help="ImageFolder of the set's classes")],
    calibration: Annotated[Path, typer.Argument(help="300 images or more")],
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    num_images: Annotated[int, typer.Option(min=64, help="per round")] = 400,
) -> None:
    """Print the result as JSON."""
    model_set = load_model_set("imagenette")
    dataset = read_dataset(images, model_set)
    part = replace(dataset, images=dataset.images[:: max(1, len(dataset.images) // num_images)])
    result = {
        "machine": describe(),
        "evaluation": _evaluation(model_set, part, rounds),
        "memory": _memory(images, len(dataset.images)),
        "quantisation": _quantisation(model_set, calibration),
    }
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n", "utf-8")


def _evaluation(model_set: ModelSet, dataset: Dataset, rounds: int) -> dict[str, Any]:
    networks = Networks(model_set, ("INT8",))
    files = [image.path.read_bytes() for image in dataset.images]
    stages = _stages(model_set, files)
    best: dict[str, dict[int, float]] = {name: {} for name in stages}
    bounds, found = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in through_threads(networks.answer, batches(dataset.images), networks.num_threads):
            pass
        found.append(len(files) / (time.perf_counter() - started))
        seconds = 0.0
        for name, runs in stages.items():
            taken = {size: run() for size, run in runs.items()}
            best[name] = {k: min(v, best[name].get(k, v)) for k, v in taken.items()}
            seconds += min(taken.values())
        bounds.append(len(files) / seconds)
    ratios = [f / b for f, b in zip(found, bounds, strict=True)]
    return {
        "images": len(files),
        "evaluated_images_per_s": [round(v, 1) for v in found],
        "bound_images_per_s": [round(v, 1) for v in bounds],
        "share_of_bound": [round(v, 3) for v in ratios],
        "median_share_of_bound": round(median(ratios), 3),
        "stage_seconds_by_batch": {
            name: {str(k): round(v, 2) for k, v in by.items()} for name, by in best.items()
        },
    }


def _stages(model_set: ModelSet, files: list[bytes]) -> dict[str, dict[int, Any]]:
    """Return, by stage and batch size, a function that runs all images and returns the seconds."""
    rule = model_set.manifest.image.rule
    pool = ThreadPoolExecutor(available_cpus())
    pixels = np.stack(list(pool.map(lambda data: read_image(data, rule), files)))

    def decode() -> float:
        started = time.perf_counter()
        for _ in pool.map(lambda data: read_image(data, rule), files):
            pass
        return time.perf_counter() - started

    stages: dict[str, dict[int, Any]] = {"decode": {1: decode}}
    for member in model_set.manifest.members:
        path = model_set.network_path(member.name, "INT8")
        stages[member.name] = {size: _throughput(path, pixels, size) for size in BATCH_SIZES}
    return stages


def _throughput(path: Path, pixels: np.ndarray, batch_size: int) -> Any:
    """Compile for throughput, as OpenVINO's own benchmark does."""
    core = ov.Core()
    model = core.read_model(path)
    model.reshape([batch_size, *pixels.shape[1:]])
    options = {
        "PERFORMANCE_HINT": "THROUGHPUT",
        "INFERENCE_NUM_THREADS": available_cpus(),
        "INFERENCE_PRECISION_HINT": "f32",  # as everything else that is compared with it
    }
    queue = ov.AsyncInferQueue(core.compile_model(model, "CPU", options))
    full = len(pixels) // batch_size * batch_size

    def run() -> float:
        started = time.perf_counter()
        for start in range(0, full, batch_size):
            queue.start_async([pixels[start : start + batch_size]], share_inputs=True)
        queue.wait_all()
        return (time.perf_counter() - started) * len(pixels) / full

    run.core = core  # type: ignore[attr-defined]  # a Core must outlive what it compiled
    return run


def _memory(images: Path, num_all: int) -> dict[str, Any]:
    """Return the peak of ``tandem evaluate`` on a few and on all images."""
    arguments = [str(TANDEM), "evaluate", "imagenette", "--images", str(images), "--no-record"]
    found = {}
    for count in (num_all // 8, num_all // 2, num_all):
        command = [*arguments, "--max-images", str(count)]
        code = (
            "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
            "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True
        )
        found[str(count)] = round(int(done.stdout) * 1024 / 1e6, 1)
    return {"peak_rss_mb_by_images": found}


def _quantisation(model_set: ModelSet, calibration: Path) -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as work:
        for member in model_set.manifest.members:
            folder = shutil.copytree(model_set.folder, Path(work) / member.name)
            arguments = ["--images", str(calibration), "--member", member.name, "--json"]
            started = time.perf_counter()
            subprocess.run(
                [TANDEM, "quantize", folder, *arguments], check=True, capture_output=True
            )
            found[member.name] = round(time.perf_counter() - started, 1)
    return {"images": 300, "command_seconds": found}


if __name__ == "__main__":
    typer.run(main)
