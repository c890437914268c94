"""Runs a model set in this process, without a service: one image, many files, the upper bound.

:func:`load` is ``tandem.load``, :class:`LocalRows` is ``tandem classify-offline``, and
:func:`limit` is ``tandem bench --limit``. Answers are those that a service would give.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from platformdirs import user_cache_path
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.answer_files import OfflineRun as OfflineRun  # an entry point names it here
from calibration.answer_files import Row
from calibration.datasets import ImageFile
from calibration.evaluation.inference import Networks, batches, through_threads
from models.ensemble import PlanName, Prediction, Probabilities, Trust, average, in_steps, reaches
from models.errors import ImageError, ModelSetError
from models.files import user_folder
from models.golden import GoldenMismatchError, check
from models.image_files import file_stamps
from models.ledger import judge
from models.machine import available_cpus
from models.model_set import (
    PRECISION_VARIABLE,
    ModelSet,
    load_model_set,
    offline_precision,
    search_path,
)
from models.network import Features, Pixels, RuntimeOptions
from models.network import load as load_network
from models.own_functions import inputs_of, outputs_of_views
from models.record import Precision

err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
out = Console(soft_wrap=True, highlight=False, emoji=False)

WARM_UP = 5  # images of :class:`OneImage`
ReportProgress = Callable[[str], None]
Map = Callable[..., Any]  # the built-in map, or a pool's


class ImageRows(NamedTuple):
    """The rows (C,) of an image: the average, and each member that was asked."""

    mean: Probabilities
    members: dict[str, Probabilities]
    trust: Trust
    embedding: Features | None = None  # (F,), if it is wanted


@dataclass(frozen=True)
class ImageInMemory(ImageFile):
    """An image whose file was read before, or the error of reading it; it has no path."""

    content: bytes | OSError

    def read_bytes(self) -> bytes:
        if isinstance(self.content, OSError):
            raise self.content
        return self.content


@dataclass(frozen=True)
class Answer:
    """The ensemble's answer for an image; every list has the likeliest class first.

    ``sure`` is None if these members have no bound for sure answers; ``no_sure`` says why.
    ``threshold`` is None unless the set is multi-label. ``asked`` and ``skipped_members`` are None
    unless the plan is fast.
    """

    model_set: str
    model_version: str
    predictions: list[Prediction]
    members: dict[str, list[Prediction]]
    agreement: bool
    sure: bool | None = None
    threshold: float | None = None
    no_sure: str | None = None
    plan: PlanName = "full"
    asked: list[str] | None = None
    skipped_members: list[str] | None = None
    embedding: list[float] | None = None

    @property
    def label(self) -> str | None:
        """The first label; None if a multi-label answer lists none."""
        return self.predictions[0].label if self.predictions else None

    def fields(self) -> dict[str, Any]:
        """Return the fields of ``/v1/classify``'s answer, without those of a request."""
        values = asdict(self)
        for name, listed in values["members"].items():
            first = {key: listed[0][key] for key in ("label", "probability")} if listed else {}
            values["members"][name] = {**first, "predictions": listed}
        values = {name: value for name, value in values.items() if value is not None}
        return {**values, "degraded": False}


class LocalEnsemble:
    """Classifies images with a set's networks on ``num_threads`` cores; None: on all cores.

    ``precision`` is INT8, FP16, auto or None: as :func:`models.model_set.offline_precision` has it.
    ``plan`` is full, which asks every member, or fast: the set's own fast plan. Answers have the
    pooled features of the member ``embedding``, if it is named.

    Raises:
        GoldenMismatchError: a network's answers on this CPU differ from those when the set was
            made.
        ModelSetError: a network cannot be loaded, INT8 lost more accuracy than the set allows, or
            the set has no fast plan for these networks, or no such embedding.
    """

    def __init__(
        self,
        model_set: ModelSet,
        precision: str | None = None,
        num_threads: int | None = None,
        plan: PlanName = "full",
        embedding: str | None = None,
    ) -> None:
        self.precision = precision = offline_precision(model_set, precision)
        if plan not in ("full", "fast"):
            raise ModelSetError(f"plan is {plan!r}; give full or fast")
        problem = model_set.manifest.plan_problem(precision, model_set.argument)
        if plan == "fast" and problem:
            raise ModelSetError(f"plan is fast, and {problem}")
        self._plan = model_set.manifest.fast_plan if plan == "fast" else None
        always = self._plan.steps[0].ask if self._plan else tuple(model_set.manifest.weights)
        if embedding is not None and embedding not in always:
            raise ModelSetError(
                f"embedding is {embedding!r}; every image is asked of {', '.join(always)}"
            )
        verdict = judge(model_set.manifest, precision, model_set.argument)
        if verdict.status == "dropped":
            raise ModelSetError(f"{verdict.message}. Only tandem serve has --allow-unverified")
        self.model_set = model_set
        self.model_version = model_set.fingerprint(precision)
        self._rule = model_set.answer_rule
        cache = user_folder(user_cache_path, "openvino")
        self._networks = Networks(model_set, [precision], cache, num_threads, self._plan, embedding)
        if (golden := model_set.golden) is not None:
            for name, network in self._networks.compiled[precision].items():
                own = model_set.manifest.member(name).precision_of(precision)
                check(golden, name, own, network)

    def classify(
        self, image: bytes | str | Path, top_k: int = 1, threshold: float | None = None
    ) -> Answer:
        """Classify an image: an encoded file's bytes, or its path.

        Raises:
            ImageError: the file is damaged, not an image, or larger than the limits.
            OSError: the file cannot be read.
        """
        data = image if isinstance(image, bytes) else Path(image).read_bytes()
        (rows,) = self._run(self._networks.read(data))
        return self._answer(rows, top_k, threshold)

    def classify_many(
        self,
        files: Sequence[bytes | Path | OSError],
        top_k: int = 1,
        threshold: float | None = None,
    ) -> Iterator[Answer | ImageError | OSError]:
        """Yield for each file, bytes or path, its answer or its error, in order.

        A thread per core handles batches of 8 files, with few batches started ahead.
        """

        def answered(batch: Sequence[ImageFile]) -> list[Answer | ImageError | OSError]:
            done, pixels = self._networks.opened(batch)
            outcomes: dict[int, Answer | ImageError | OSError] = {
                id(image): error for image, error in done.unreadable
            }
            for image, rows in zip(done.images, self._run(pixels), strict=True):
                outcomes[id(image)] = self._answer(rows, top_k, threshold)
            return [outcomes[id(image)] for image in batch]

        images = [ImageFile(f) if isinstance(f, Path) else ImageInMemory(Path(), f) for f in files]
        for batch in through_threads(answered, batches(images), self._networks.num_threads):
            yield from batch

    def _run(self, images: Pixels) -> list[ImageRows]:
        """Ask the members about up to 8 decoded images, in the steps of the plan."""
        weights, trust = self.model_set.manifest.weights, self.model_set.trust
        if not len(images):
            return []
        pooled: list[Features] = []
        ask = partial(self._networks.ask, self.precision, pooled=pooled)
        if self._plan is None:
            rows = ask(weights, images)
            mean = average(rows, weights, trust.whole.temperature)
            parts = [(trust.whole, np.arange(len(images)), mean, rows)]
        else:
            steps = in_steps(
                self._plan, len(images), lambda names, at: ask(names, images[at]), weights
            )
            parts = [(trust.of(own, step), places, of, own) for step, places, of, own in steps]
        done = {
            int(image): ImageRows(mean[row], {n: r[row] for n, r in rows.items()}, own)
            for own, places, mean, rows in parts
            for row, image in enumerate(places)
        }
        answered = [done[place] for place in range(len(images))]
        if not pooled:
            return answered
        return [row._replace(embedding=own) for row, own in zip(answered, pooled[0], strict=True)]

    def _answer(self, rows: ImageRows, top_k: int, threshold: float | None) -> Answer:
        rule, (mean, members, trust, pooled) = self._rule.asked(threshold), rows
        answer = Answer(
            self.model_set.name,
            self.model_version,
            rule.predictions(mean, top_k),
            {name: rule.predictions(row, top_k) for name, row in members.items()},
            rule.agree(members.values()),
            reaches(mean, trust.sure_from),
            rule.threshold,
            trust.no_bound,
            embedding=None if pooled is None else pooled.tolist(),
        )
        if self._plan is None:
            return answer
        skipped = [name for name in self.model_set.manifest.weights if name not in members]
        return replace(answer, plan="fast", asked=list(members), skipped_members=skipped or None)


def load(
    name: str = "imagenette",
    precision: str | None = None,
    plan: PlanName = "full",
    embedding: str | None = None,
) -> LocalEnsemble:
    """Load a model set's ensemble by name or folder, which answers by a plan: full or fast.

    ``embedding`` names the member whose pooled features answers have; None: they have none. Raises
    :class:`ModelSetError` if there is no such set, or it may not answer here; see the class.
    """
    return _ensemble(load_model_set(name), precision, None, plan, embedding)


def _ensemble(
    model_set: ModelSet,
    precision: str | None,
    num_threads: int | None,
    plan: PlanName,
    embedding: str | None = None,
) -> LocalEnsemble:
    """Load an ensemble; auto is FP16 where this CPU computes INT8 otherwise, as for the service."""
    try:
        return LocalEnsemble(model_set, precision, num_threads, plan, embedding)
    except GoldenMismatchError as error:
        is_auto = (precision or os.environ.get(PRECISION_VARIABLE)) == "auto"
        if not is_auto or "FP16" not in model_set.fingerprints:
            raise
        err.print(f"precision auto: FP16 answers, not INT8: {escape(error.message)}")
        return LocalEnsemble(model_set, "FP16", num_threads, plan, embedding)


class LocalRows:
    """Classifies files with a set's networks in this process.

    ``num_threads`` is the number of cores; None: all. ``precision`` as of :class:`LocalEnsemble`.
    Raises :class:`ModelSetError` if the set is not there, or may not answer here.
    """

    def __init__(
        self,
        name: str,
        num_threads: int | None = None,
        plan: PlanName = "full",
        precision: str | None = None,
        embedding: str | None = None,
    ) -> None:
        self._ensemble = _ensemble(load_model_set(name), precision, num_threads, plan, embedding)
        self.manifest = self._ensemble.model_set.manifest
        self.model_version = self._ensemble.model_version

    def rows(
        self,
        files: Sequence[str],
        top_k: int,
        threshold: float | None,
        contents: Sequence[bytes | OSError] | None = None,
    ) -> Iterator[Row]:
        """Yield a row per file, in order; ``contents``: the files' bytes, if read before."""
        read = list(map(Path, files)) if contents is None else contents
        answers = self._ensemble.classify_many(read, top_k, threshold)
        for file, answer in zip(files, answers, strict=True):
            if isinstance(answer, Answer):
                yield {"file": file, **answer.fields()}
            else:
                code = answer.code if isinstance(answer, ImageError) else "unreadable"
                yield {"file": file, "error": {"code": code, "message": str(answer)}}

    def stamps(self, files: Sequence[str]) -> list[tuple[int, int] | None]:
        """Return the bytes and time of change of each file."""
        return file_stamps(files)


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
        self._inputs = inputs_of(model_set.manifest)
        self._weights = model_set.manifest.weights
        options = RuntimeOptions(
            num_threads=setup.streams * setup.threads,
            num_streams=setup.streams,
            batch_sizes=(setup.batch_size,),
            float_type=model_set.manifest.float_type,
        )
        paths = {name: model_set.network_path(name, precision) for name in self._weights}
        self._networks = {name: load_network(path, options) for name, path in paths.items()}

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
        pixels = self._inputs.views(np.stack([self._inputs.read(body) for body in batch]))
        names = list(self._networks)
        rows = self._map(
            lambda n: outputs_of_views(self._networks[n], self._inputs.of(n, pixels))[0], names
        )
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

        def time_ms(way: InProcessPipeline, number: int) -> float:
            started = time.perf_counter()
            way.answer([bodies[number % len(bodies)]])
            return (time.perf_counter() - started) * 1e3

        numbers = range(WARM_UP + num_images)
        return min(median([time_ms(way, n) for n in numbers][WARM_UP:]) for way in self._ways)


def measure_upper_bound(
    model_set: ModelSet,
    bodies: Sequence[bytes],
    precision: Precision = "INT8",
    *,
    rounds: int = 3,
    seconds: float = 2.0,
    report: ReportProgress = lambda _: None,
) -> UpperBound:
    """Try every setup in turn, ``rounds`` times ``seconds`` each; return the best median.

    The bound is of decoder and networks in one process, without a server, on all cores. Every
    worker thread handles whole batches: it decodes, then runs each member on its own infer request.
    """
    report("compiling")
    tried = setups(available_cpus())
    pipelines = [InProcessPipeline(model_set, precision, setup) for setup in tried]
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
    streams = sorted({1, cores} | {n for n in (2, 4, 8, 16, 32) if cores % n == 0})
    return [Setup(size, count, cores // count) for count in streams for size in (1, 4, 8, 16)]


def _batches_for(pipeline: InProcessPipeline, bodies: Sequence[bytes], seconds: float) -> int:
    """Return how many batches take about ``seconds``; running a few also warms up."""
    streams, size = pipeline.setup.streams, pipeline.setup.batch_size
    rate = pipeline.run(bodies, 2 * streams)
    return max(streams, round(rate * seconds / size / streams) * streams)


def limit(
    bodies: list[bytes], model_set: str, precision: str | None, duration_s: float, *, quiet: bool
) -> dict[str, Any]:
    """Measure the bound, show it unless ``quiet``, and return it as plain values."""
    loaded = load_model_set(model_set, search_path())
    chosen = offline_precision(loaded, precision)
    with err.status("measuring") as status:
        bound = measure_upper_bound(
            loaded,
            bodies,
            chosen,
            seconds=duration_s / 5,
            report=lambda text: status.update(escape(text)),
        )
    if not quiet:
        show_bound(out, bound)
    return {"model_set": loaded.name, "limit": bound.as_json()}


def show_bound(console: Console, bound: UpperBound) -> None:
    """Print every setup that was tried, and the bound."""
    table = Table("streams", "threads each", "batch", "images/s")
    for setup, rate in bound.setups.items():
        cells = (str(setup.streams), str(setup.threads), str(setup.batch_size), f"{rate:.1f}")
        table.add_row(*cells, style="bold" if setup == bound.best else "")
    console.print(table)
    console.print(
        f"the bound of this machine, no server: [bold]{bound.images_per_s:.1f} images/s[/] "
        f"({bound.precision}, decode and every member); one image alone {bound.latency_ms:.1f} ms"
    )
