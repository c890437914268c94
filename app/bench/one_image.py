"""Latency of one image without a server: decode it, then run the members in parallel."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from models.cpus import available_cpus
from models.model_set import ModelSet
from models.record import Precision
from models.runtimes.interface import LoadedNetwork
from models.runtimes.load import load
from models.runtimes.options import Pixels, RuntimeOptions

WARM_UP = 5  # images


class OneImage:
    """The networks compiled for one image, in the two ways that share the cores.

    The members at the same time with a share of the cores each, or one by one with all of them.
    """

    def __init__(self, model_set: ModelSet, precision: Precision) -> None:
        self._inputs = model_set.manifest.inputs
        names = [m.name for m in model_set.manifest.members]
        cores = available_cpus()

        def networks(num_threads: int) -> list[tuple[str, LoadedNetwork]]:
            float_type = model_set.manifest.float_type
            options = RuntimeOptions(num_threads, batch_sizes=(1,), float_type=float_type)
            return [(n, load(model_set.network_path(n, precision), options)) for n in names]

        self._shared, self._in_turn = networks(max(1, cores // len(names))), networks(cores)
        self._pool = ThreadPoolExecutor(len(names))

    def measure(self, bodies: Sequence[bytes], num_images: int = 60) -> float:
        """Return the median ms of an image, by the better of the two ways."""
        return min(
            self._measure(run, bodies, num_images) for run in (self._side_by_side, self._one_by_one)
        )

    def _measure(
        self, run: Callable[[Pixels], None], bodies: Sequence[bytes], num_images: int
    ) -> float:
        times = []
        for number in range(WARM_UP + num_images):
            started = time.perf_counter()
            run(self._inputs.read(bodies[number % len(bodies)])[np.newaxis])
            times.append((time.perf_counter() - started) * 1e3)
        return median(times[WARM_UP:])

    def _side_by_side(self, pixels: Pixels) -> None:
        list(self._pool.map(lambda member: self._infer(member, pixels), self._shared))

    def _one_by_one(self, pixels: Pixels) -> None:
        for member in self._in_turn:
            self._infer(member, pixels)

    def _infer(self, member: tuple[str, LoadedNetwork], pixels: Pixels) -> None:
        name, network = member
        network.predict(self._inputs.of(name, pixels))
