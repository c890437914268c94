"""Runs the networks of a set over a dataset, streamed, with a thread per core.

Each thread handles whole batches: it reads, decodes, and runs the networks on its own infer
requests with one thread each. So nothing is passed between threads, no core waits, and memory does
not grow with the images.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Generic, TypeVar

import numpy as np

from calibration.datasets import ImageFile
from models.ensemble import PlanRecord, Probabilities, average, tempered
from models.errors import ImageError, ModelSetError
from models.image_colors import offline_profiles
from models.machine import available_cpus
from models.manifest import ENSEMBLE, Manifest
from models.model_set import ModelSet
from models.network import Features, LoadedNetwork, Pixels, RuntimeOptions, load
from models.own_functions import inputs_of, outputs_of_views
from models.record import Precision

BATCH = 8
NUM_ROUNDS = 7  # of timing every network
# float32 (N, C) by precision, then by member or "ensemble"
NetworkProbabilities = dict[Precision, dict[str, Probabilities]]
T = TypeVar("T")
R = TypeVar("R")
File = TypeVar("File", bound=ImageFile)


@dataclass
class AnsweredBatch(Generic[File]):
    """A batch's readable images and the networks' answers."""

    images: list[File]  # N readable ones
    data: list[bytes]  # their files
    probabilities: NetworkProbabilities
    unreadable: list[tuple[File, ImageError | OSError]]


Track = Callable[[Iterable[Sequence[File]], int], Iterable[Sequence[File]]]
Observer = Callable[[AnsweredBatch[File]], None]


class Networks:
    """Every member of a set in some precisions, compiled for ``num_threads``; None: all cores.

    ``cache_dir`` keeps compiled networks; None: they are compiled each time. With a ``plan`` only
    its members are compiled, also for batches of which few images are left. The member
    ``embedding`` also gives pooled features; :class:`ModelSetError` is raised if it has none.
    """

    def __init__(
        self,
        model_set: ModelSet,
        precisions: Sequence[Precision],
        cache_dir: Path | None = None,
        num_threads: int | None = None,
        plan: PlanRecord | None = None,
        embedding: str | None = None,
    ) -> None:
        self.embedding = embedding
        self.manifest: Manifest = model_set.manifest
        self.num_threads = num_threads or available_cpus()
        self._inputs = inputs_of(self.manifest).with_profiles(offline_profiles())
        self._weights = self.manifest.weights
        self._temperatures = self.manifest.temperatures
        self._cache_dir = cache_dir
        self._batch_sizes = (1, 2, 4, BATCH) if plan else (BATCH,)
        wanted = [
            (precision, member.name)
            for precision in precisions
            for member in self.manifest.members
            if member.precision_of(precision) in member.networks
            and (plan is None or member.name in plan.members)
        ]
        self.compiled: dict[Precision, dict[str, LoadedNetwork]] = {p: {} for p in precisions}
        # Compiling, or reading from the cache, mainly uses one thread.
        with ThreadPoolExecutor(self.num_threads, "compile") as pool:
            networks = pool.map(lambda each: self._compile(model_set, *each), wanted)
            for (precision, name), network in zip(wanted, networks, strict=True):
                self.compiled[precision][name] = network

    def _compile(self, model_set: ModelSet, precision: Precision, member: str) -> LoadedNetwork:
        options = RuntimeOptions(
            num_threads=self.num_threads,
            num_streams=self.num_threads,
            batch_sizes=self._batch_sizes,
            # The reference is f32 in every set; INT8 is measured as it is served.
            float_type="f32" if precision == "FP16" else self.manifest.float_type,
            cache_dir=self._cache_dir,
            has_features=member == self.embedding,
        )
        network = load(model_set.network_path(member, precision), options)
        size = self.manifest.image_of(member).input_size
        network.check_fits(size, self.manifest.num_classes)
        if member == self.embedding and network.no_features is not None:
            raise ModelSetError(f"{member} has no embedding: {network.no_features}")
        return network

    def answers(
        self, images: Sequence[File], track: Track[File], observe: Observer[File] | None
    ) -> Iterator[AnsweredBatch[File]]:
        """Yield the answers to all images in batches, in order, without the files.

        ``track`` wraps the batches, for a progress bar. ``observe`` is called with each batch and
        its files, in the thread that ran it.
        """

        def work(batch: Sequence[File]) -> AnsweredBatch[File]:
            answered = self.answer(batch)
            if observe is not None:
                observe(answered)
            answered.data = []
            return answered

        return through_threads(work, track(batches(images), len(images)), self.num_threads)

    def answer(self, batch: Sequence[File]) -> AnsweredBatch[File]:
        """Read up to 8 images and run every network; return unreadable files instead of raising."""
        done, pixels = self.opened(batch)
        if len(pixels):
            done.probabilities = self.run(pixels)
        return done

    def opened(self, batch: Sequence[File]) -> tuple[AnsweredBatch[File], Pixels]:
        """Read images; return them without answers, and the pixels of the readable ones."""
        done = AnsweredBatch[File]([], [], {}, [])
        pixels: list[Pixels] = []
        for image in batch:
            try:
                data = image.read_bytes()
                pixels.append(self._inputs.read(data))
            except (ImageError, OSError) as error:
                done.unreadable.append((image, error))
                continue
            done.images.append(image)
            done.data.append(data)
        return done, self._inputs.views(np.stack(pixels)) if pixels else np.zeros(0, np.uint8)

    def read(self, data: bytes) -> Pixels:
        """Decode a file, a batch of one; raise :class:`ImageError` if it is damaged or no image."""
        return self._inputs.views(self._inputs.read(data)[None])

    def run(self, images: Pixels) -> NetworkProbabilities:
        """Return the answers of every network, and of the ensemble, to up to 8 decoded images."""
        by_precision: NetworkProbabilities = {}
        for precision, members in self.compiled.items():
            rows = self.ask(precision, members, images)
            if len(rows) == len(self._weights):  # an ensemble needs all members
                rows[ENSEMBLE] = average(rows, self._weights, self._temperatures[ENSEMBLE])
            by_precision[precision] = rows
        return by_precision

    def ask(
        self,
        precision: Precision,
        names: Iterable[str],
        images: Pixels,
        pooled: list[Features] | None = None,
    ) -> dict[str, Probabilities]:
        """Return the answers of some members to up to 8 decoded images.

        ``pooled`` gets the features of the member ``embedding``, (N, F), if it is asked.
        """
        rows = {}
        for name in names:
            network = self.compiled[precision][name]
            own, features = outputs_of_views(network, self._inputs.of(name, images))
            if features is not None and pooled is not None:
                pooled.append(features)
            rows[name] = tempered(own, self._temperatures[name])
            if not np.isfinite(rows[name]).all():
                raise ModelSetError(
                    f"{name} {precision} answers NaN or infinity to an image: the network is "
                    "broken; convert or quantise it again"
                )
        return rows

    def float_types(self) -> dict[Precision, str]:
        """Return the type in which layers that are not INT8 compute, by precision."""
        return {
            precision: ", ".join(sorted({network.float_type for network in members.values()}))
            for precision, members in self.compiled.items()
        }

    def int8_kernels(self) -> str:
        """Return the convolution kernels of the INT8 networks, if the runtimes name them."""
        int8 = self.compiled.get("INT8", {}).values()
        return ", ".join(sorted({kernel for network in int8 for kernel in network.kernels}))

    def cpu_ms_per_image(self) -> dict[str, dict[Precision, float]]:
        """Return each network's CPU-ms per image, as :func:`least_cpu_ms`."""
        least = least_cpu_ms(
            {
                (name, precision): network
                for precision, members in self.compiled.items()
                for name, network in members.items()
            }
        )
        costs: dict[str, dict[Precision, float]] = {}
        for (name, precision), value in least.items():
            costs.setdefault(name, {})[precision] = value
        return costs


def least_cpu_ms(
    networks: Mapping[tuple[str, Precision], LoadedNetwork],
) -> dict[tuple[str, Precision], float]:
    """Return each network's CPU-ms per image, the least of several rounds.

    Rounds alternate between the networks, so that other load on the machine affects all alike.
    Batches have 8 images, or as many as the network's own.
    """
    least: dict[tuple[str, Precision], float] = {}
    for number in range(NUM_ROUNDS + 1):  # the first warms up
        for key, network in networks.items():
            size = network.fixed_batch or BATCH
            images = np.full((size, *network.input_shape), 127, np.uint8)
            started = process_time()
            network.predict(images)
            taken_ms = (process_time() - started) / size * 1e3
            if number:
                least[key] = min(taken_ms, least.get(key, taken_ms))
    return {key: max(0.001, round(value, 3)) for key, value in least.items()}


def through_threads(work: Callable[[T], R], items: Iterable[T], num_threads: int) -> Iterator[R]:
    """Yield ``work(item)`` in order, ``num_threads`` at a time, with few items started ahead."""
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(num_threads, "evaluate")
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # on an error or Ctrl-C: running work ends, waiting work is dropped
        pool.shutdown(wait=True, cancel_futures=True)


def batches(images: Sequence[T], size: int = BATCH) -> Iterator[Sequence[T]]:
    """Yield slices of ``size`` items."""
    for start in range(0, len(images), size):
        yield images[start : start + size]
