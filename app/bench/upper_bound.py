"""The upper bound: the same decoder and networks in one process, without a server, all cores busy.

Every worker thread does the whole way of a batch: decode, then each member on an infer request of
its own. Which batch size and how many streams are best is found by trying; setups take turns.
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
    """One way to use the cores: ``streams`` batches at a time, ``threads`` cores each."""

    batch_size: int
    streams: int
    threads: int


@dataclass(frozen=True)
class UpperBound:
    """What this machine can do without a server."""

    precision: Precision
    num_photos: int
    best: Setup
    images_per_s: float
    latency_ms: float  # of one image: decode, then the members in parallel or one by one
    setups: dict[Setup, float]  # images/s of each that was tried

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        rows = [{**asdict(setup), "images_per_s": rate} for setup, rate in self.setups.items()]
        return {**vars(self), "best": asdict(self.best), "setups": rows}


class InProcessPipeline:
    """The networks compiled for one setup, and the loop that keeps them busy.

    ``over_members`` runs a function for every member: in turn, or at the same time.
    """

    def __init__(
        self, model_set: ModelSet, precision: Precision, setup: Setup, over_members: Map = map
    ) -> None:
        self.setup, self._map = setup, over_members
        self._inputs = model_set.manifest.inputs
        self._weights = {m.name: m.weight for m in model_set.manifest.members}
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
        """Answer ``num_batches`` batches on all streams; return images per second."""
        size = self.setup.batch_size

        def one(number: int) -> None:
            first = number * size
            self.answer([bodies[(first + i) % len(bodies)] for i in range(size)])

        with ThreadPoolExecutor(self.setup.streams) as pool:
            started = time.perf_counter()
            for _ in pool.map(one, range(num_batches)):
                pass
            return num_batches * size / (time.perf_counter() - started)

    def answer(self, batch: Sequence[bytes]) -> np.ndarray:
        """Decode a batch and return the ensemble's float32 (N, C)."""
        pixels = np.stack([self._inputs.read(body) for body in batch])
        names = list(self._networks)
        rows = self._map(lambda n: self._networks[n].predict(self._inputs.of(n, pixels)), names)
        return average(dict(zip(names, rows, strict=True)), self._weights)


class OneImage:
    """Latency of one image: the networks compiled for it, in the two ways that share the cores.

    The members at the same time with a share of the cores each, or one by one with all of them.
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
        """Return the median ms of an image, by the better of the two ways."""
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
    """Try every setup in turns, ``rounds`` times ``seconds`` each, and take the best median."""
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
    """Return the setups worth trying: one stream of all cores to one per core, small to large."""
    streams = {1, cores} | {n for n in (2, 4, 8, 16, 32) if cores % n == 0}
    return [
        Setup(size, count, cores // count) for count in sorted(streams) for size in (1, 4, 8, 16)
    ]


def _batches_for(pipeline: InProcessPipeline, bodies: Sequence[bytes], seconds: float) -> int:
    """Return how many batches take about ``seconds``; running a few warms up as well."""
    streams, size = pipeline.setup.streams, pipeline.setup.batch_size
    rate = pipeline.run(bodies, 2 * streams)
    return max(streams, round(rate * seconds / size / streams) * streams)
