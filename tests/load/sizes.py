"""What members of several sizes cost: reading a photo for one and for all, beside the networks.

python tests/load/sizes.py PHOTOS SET > tests/load/results/sizes.json

CPU-ms an image, on one thread beside the main one, the median of some passes, in turns. ``over``:
reading for all inputs and running all networks, over reading for the largest alone and running all
networks, whose other inputs were made before; the median of each turn's.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Annotated

import cv2
import typer
from machine import describe

from app.bench.load import photos_in
from models.image_inputs import ImageInputs
from models.memory import keep_freed_memory
from models.model_set import ModelSet, load_model_set
from models.runtime import CompiledNetwork, Pixels, RuntimeOptions

ROUNDS = 15
BATCH = 8


def main(
    photos: Annotated[Path, typer.Argument(help="a folder")],
    model_set: Annotated[str, typer.Argument(help="name or folder of a set of several sizes")],
    num_photos: Annotated[int, typer.Option()] = 64,
) -> None:
    """Measure, and print JSON."""
    cv2.setNumThreads(1)  # as a Decoder sets its process up
    keep_freed_memory()
    loaded = load_model_set(model_set)
    bodies = photos_in(photos)[:num_photos]
    work = Work(loaded, bodies)
    with ThreadPoolExecutor(1) as thread:  # as in the service: memory is a thread's
        found = thread.submit(measured, work.parts(), len(bodies)).result()
    result = {
        **describe(),
        "model_set": loaded.manifest.name,
        "num_photos": len(bodies),
        "cpu_ms_per_image": {name: round(median(ms), 3) for name, ms in found.items()},
        "over": round(median(map(truediv, found["all"], found["all of one read"])) - 1, 4),
    }
    typer.echo(json.dumps(result, indent=1))


class Work:
    """What is timed: reading the photos and running the networks, apart and together.

    Args:
        loaded: the set.
        bodies: the photos' files.

    """

    def __init__(self, loaded: ModelSet, bodies: Sequence[bytes]) -> None:
        self._inputs, self._bodies = loaded.manifest.inputs, bodies
        members = loaded.manifest.members
        precision = next(iter(members[0].networks))
        options = RuntimeOptions(batch_sizes=(BATCH,))
        self._networks = {
            m.name: CompiledNetwork(loaded.network_path(m.name, precision), options)
            for m in members
        }
        self._images = [self._inputs.read(body) for body in bodies]
        self._alone = {  # the largest first
            str(rule.input_size): ImageInputs({"one": rule})
            for rule in sorted(self._inputs.rules, key=lambda rule: -rule.input_size)
        }

    def parts(self) -> dict[str, Callable[[], None]]:
        """Return what is timed, by name."""
        largest = next(iter(self._alone.values()))
        return {
            **{f"read {size}": partial(self._read, one) for size, one in self._alone.items()},
            "read all": partial(self._read, self._inputs),
            **{f"run {name}": partial(self._run, name, self._images) for name in self._networks},
            "all": partial(self._run_all, self._inputs),
            "all of one read": partial(self._run_all, largest),
        }

    def _read(self, one: ImageInputs) -> None:
        for body in self._bodies:  # none is kept: fresh memory would be most of the price
            one.read(body)

    def _run(self, name: str, images: Sequence[Pixels]) -> None:
        for start in range(0, len(images), BATCH):
            self._networks[name].predict(self._views(name, images[start : start + BATCH]))

    def _run_all(self, one: ImageInputs) -> None:
        for start in range(0, len(self._bodies), BATCH):
            part = slice(start, start + BATCH)
            read = [one.read(body) for body in self._bodies[part]]
            for name in self._networks:
                self._run(name, read if one is self._inputs else self._images[part])

    def _views(self, name: str, images: Sequence[Pixels]) -> list[Pixels]:
        """Return a member's input of each image, as a batch queue hands them on: not copied."""
        return [self._inputs.of(name, image[None])[0] for image in images]


def measured(work: dict[str, Callable[[], None]], num_images: int) -> dict[str, list[float]]:
    """Return the CPU-ms an image of each, of each of ``ROUNDS`` turns."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(ROUNDS):
        for name, run in work.items():
            started = time.process_time()
            run()
            found[name].append((time.process_time() - started) / num_images * 1e3)
    return found


if __name__ == "__main__":
    typer.run(main)
