"""The upper bound: decoder and networks in one process, without a server, on all cores.

Every worker thread handles whole batches: it decodes, then runs each member on its own infer
request. Setups with different batch sizes and numbers of streams take turns, and the best counts.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from models.cpus import available_cpus
from models.ensemble import average
from models.model_set import ModelSet
from models.record import Precision
from models.runtimes.load import load
from models.runtimes.options import RuntimeOptions

WARM_UP = 5  # images of :class:`OneImage`
ReportProgress = Callable[[str], None]
Map = Callable[..., Any]  # the built-in map, or a pool's


@dataclass(frozen=True)
class Setup:
    """A way to use the cores: ``streams`` batches at a time, with ``threads`` cores each."""

    batch_size: int
    streams: int
    threads: int


@dataclass(frozen=True)
class UpperBound:
    """The throughput of this machine without a server."""

    precision: Precision
    num_photos: int
    best: Setup
    images_per_s: float
    latency_ms: float  # of an image: decode, then the members in parallel or one by one
    setups: dict[Setup, float]  # images/s of each setup

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        rows = [{**asdict(setup), "images_per_s": rate} for setup, rate in self.setups.items()]
        return {**vars(self), "best": asdict(self.best), "setups": rows}


class InProcessPipeline:
    """The networks compiled for a setup, and the loop that keeps them busy.

    ``over_members`` calls a function for every member: one by one, or in parallel.
    """

    def __init__(
        self, model_set: ModelSet, precision: Precision, setup: Setup, over_members: Map = map
    ) -> None:
        self.setup, self._map = setup, over_members
        self._inputs = model_set.manifest.inputs
        self._weights = model_set.manifest.weights
        options = RuntimeOptions(
            num_threads=setup.streams * setup.threads,
            num_streams=setup.streams,
            batch_sizes=(setup.batch_size,),
            float_type=model_set.manifest.float_type,
        )
        self._networks = {
            name: load(model_set.network_path(name, precision), options) for name in self._weights
        }

    def run(self, bodies: Sequence[bytes], num_batches: int) -> float:
        """Run ``num_batches`` batches on all streams; return images per second."""
        size = self.setup.batch_size

        def run_batch(number: int) -> None:
            first = number * size
            self.answer([bodies[(first + i) % len(bodies)] for i in range(size)])

        with ThreadPoolExecutor(self.setup.streams) as pool:
            started = time.perf_counter()
            for _ in pool.map(run_batch, range(num_batches)):
                pass
            return num_batches * size / (time.perf_counter() - started)

    def answer(self, batch: Sequence[bytes]) -> np.ndarray:
        """Decode a batch and return the ensemble's float32 (N, C)."""
        pixels = np.stack([self._inputs.read(body) for body in batch])
        names = list(self._networks)
        rows = self._map(lambda n: self._networks[n].predict(self._inputs.of(n, pixels)), names)
        return average(dict(zip(names, rows, strict=True)), self._weights)


class OneImage:
    """Latency of a single image, with the cores used in two ways.

    The members run in parallel with a share of the cores each, or one by one with all cores.
    """

    def __init__(self, model_set: ModelSet, precision: Precision) -> None:
        cores, num_members = available_cpus(), len(model_set.manifest.members)
        all_cores, share = (Setup(1, 1, n) for n in (cores, max(1, cores // num_members)))
        at_once = ThreadPoolExecutor(num_members).map
        self._ways = (
            InProcessPipeline(model_set, precision, all_cores),
            InProcessPipeline(model_set, precision, share, at_once),
        )

    def measure(self, bodies: Sequence[bytes], num_images: int = 60) -> float:
        """Return the median ms per image, of the better way."""
        return min(_median_ms(way, bodies, num_images) for way in self._ways)


def _median_ms(pipeline: InProcessPipeline, bodies: Sequence[bytes], num_images: int) -> float:
    times = []
    for number in range(WARM_UP + num_images):
        started = time.perf_counter()
        pipeline.answer([bodies[number % len(bodies)]])
        times.append((time.perf_counter() - started) * 1e3)
    return median(times[WARM_UP:])


def measure_upper_bound(
    model_set: ModelSet,
    bodies: Sequence[bytes],
    precision: Precision = "INT8",
    *,
    rounds: int = 3,
    seconds: float = 2.0,
    report: ReportProgress = lambda _: None,
) -> UpperBound:
    """Try every setup in turn, ``rounds`` times ``seconds`` each; return the best median."""
    report("compiling")
    pipelines = [
        InProcessPipeline(model_set, precision, setup) for setup in setups(available_cpus())
    ]
    num_batches = [_batches_for(p, bodies, seconds) for p in pipelines]
    measured: dict[Setup, list[float]] = {pipeline.setup: [] for pipeline in pipelines}
    for number in range(rounds):
        for pipeline, num in zip(pipelines, num_batches, strict=True):
            report(f"round {number + 1} of {rounds}: {pipeline.setup}")
            measured[pipeline.setup].append(pipeline.run(bodies, num))
    report("latency of one image")
    rates = {setup: round(median(values), 2) for setup, values in measured.items()}
    best = max(rates, key=lambda setup: rates[setup])
    latency_ms = round(OneImage(model_set, precision).measure(bodies), 2)
    return UpperBound(precision, len(bodies), best, rates[best], latency_ms, rates)


def setups(cores: int) -> list[Setup]:
    """Return the setups to try: from one stream on all cores to one per core, small to large."""
    streams = {1, cores} | {n for n in (2, 4, 8, 16, 32) if cores % n == 0}
    return [
        Setup(size, count, cores // count) for count in sorted(streams) for size in (1, 4, 8, 16)
    ]


def _batches_for(pipeline: InProcessPipeline, bodies: Sequence[bytes], seconds: float) -> int:
    """Return how many batches take about ``seconds``; running a few also warms up."""
    streams, size = pipeline.setup.streams, pipeline.setup.batch_size
    rate = pipeline.run(bodies, 2 * streams)
    return max(streams, round(rate * seconds / size / streams) * streams)
