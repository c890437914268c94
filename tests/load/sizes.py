"""What members of several sizes cost: reading a photo for one and for all, beside the networks.

python tests/load/sizes.py PHOTOS SET > tests/load/results/sizes.json

CPU-ms an image on one thread, the best of a few passes, in turns. ``over``: reading for all inputs
and running all networks, over reading for the largest alone and running all networks, whose other
inputs were made before.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import cv2
import numpy as np
import typer
from machine import describe

from models.image_inputs import ImageInputs
from models.model_set import load_model_set
from models.runtime import CompiledNetwork, RuntimeOptions

ROUNDS = 7
BATCH = 8


def main(
    photos: Annotated[Path, typer.Argument(help="a folder")],
    model_set: Annotated[str, typer.Argument(help="name or folder of a set of several sizes")],
    num_photos: Annotated[int, typer.Option()] = 64,
) -> None:
    """Measure, and print JSON."""
    cv2.setNumThreads(1)
    loaded = load_model_set(model_set)
    manifest, inputs = loaded.manifest, loaded.manifest.inputs
    bodies = [path.read_bytes() for path in sorted(photos.rglob("*.JPEG"))[:num_photos]]
    options = RuntimeOptions(batch_sizes=(BATCH,))
    precision = next(iter(manifest.members[0].networks))
    networks = {
        m.name: CompiledNetwork(loaded.network_path(m.name, precision), options)
        for m in manifest.members
    }
    images = np.stack([inputs.read(body) for body in bodies])
    alone = {
        str(rule.input_size): ImageInputs({"one": rule})
        for rule in sorted(inputs.rules, key=lambda rule: -rule.input_size)
    }

    def read(one: ImageInputs) -> None:
        for body in bodies:  # none is kept: fresh memory would be most of the price
            one.read(body)

    def run(name: str) -> None:
        for start in range(0, len(images), BATCH):
            networks[name].infer(inputs.of(name, images[start : start + BATCH]))

    def run_all(one: ImageInputs) -> None:
        for start in range(0, len(bodies), BATCH):
            part = slice(start, start + BATCH)
            batch = np.stack([one.read(body) for body in bodies[part]])
            for name, network in networks.items():
                network.infer(inputs.of(name, batch if one is inputs else images[part]))

    work: dict[str, Callable[[], None]] = {
        f"read {size}": partial(read, one) for size, one in alone.items()
    }
    work |= {"read all": partial(read, inputs)}
    work |= {f"run {name}": partial(run, name) for name in networks}
    largest = next(iter(alone.values()))
    work |= {"all": partial(run_all, inputs), "all of one read": partial(run_all, largest)}
    found = measured(work, len(bodies))
    result = {
        **describe(),
        "model_set": manifest.name,
        "num_photos": len(bodies),
        "cpu_ms_per_image": {name: round(ms, 3) for name, ms in found.items()},
        "over": round(found["all"] / found["all of one read"] - 1, 4),
    }
    typer.echo(json.dumps(result, indent=1))


def measured(work: dict[str, Callable[[], None]], num_images: int) -> dict[str, float]:
    """Return the CPU-ms an image of each, the best of ``ROUNDS``."""
    best = dict.fromkeys(work, float("inf"))
    for _ in range(ROUNDS):
        for name, run in work.items():
            started = time.process_time()
            run()
            best[name] = min(best[name], (time.process_time() - started) / num_images * 1e3)
    return best


if __name__ == "__main__":
    typer.run(main)
