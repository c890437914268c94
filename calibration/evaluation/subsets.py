"""Compares the ensembles of a set's members: every subset, averaged or as a logarithmic pool.

A hash of each image's file decides its half, so copies of an image are in the same one. The first
half fits weights, the second judges. Kept are the rows of fitting images, up to a limit, and a byte
per judging image and ensemble: whether it was right, since each is compared with the best.

The logarithmic opinion pool is log p(class) = sum of w_m log p_m(class), minus a constant. That is
multinomial logistic regression on the members' log-probabilities, with a coefficient per member
(Hinton 2002, products of experts; Heskes 1998). Its log-likelihood is concave in the weights. They
need not sum to one: their sum makes the pool more or less confident than its members.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from time import process_time
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import openvino as ov
import psutil
from openvino import opset13 as ops
from scipy.optimize import minimize
from scipy.special import logsumexp

from calibration.datasets import LabelledImage, truth_of
from calibration.evaluation.inference import BATCH, AnsweredBatch
from calibration.statistics import EDGES, CascadePoint, CascadeTally, Paired, Rightness
from models.ensemble import Probabilities, average, margins
from models.errors import ModelSetError
from models.manifest import Manifest, wilson_interval
from models.model_set import ModelSet
from models.network import LoadedNetwork, load
from models.openvino_network import CompiledNetwork, RuntimeOptions
from models.record import Precision, sha256_of

# average: of probabilities, with the manifest's weights. logistic: of their logarithms, with fitted
# weights. Ties go to the first.
Method = Literal["average", "logistic"]
MAX_MEMBERS = 8  # 255 subsets
NUM_ROUNDS = 7  # of timing every member
Matrix = npt.NDArray[np.float32]
FLOOR = np.float32(1e-7)  # of a probability, since quantised networks return zeros
MAX_WEIGHT = 20.0  # of a member in the pool
Weights = npt.NDArray[np.float64]
SIGNIFICANCE = 0.05  # of McNemar's test against the best
PREFERENCE: tuple[Method, ...] = ("average", "logistic")  # among equals
# float32 of whole rows, 32 MiB: 1,000 images of 8 members with 1,000 classes. Their 247 fits take
# minutes, and a coefficient per member needs no more images.
MAX_KEPT_VALUES = 8 * 2**20


@dataclass(frozen=True)
class Candidate:
    """An ensemble of some of a set's members."""

    weights: dict[str, float]  # in the manifest's order; an average's sum to one
    method: Method


@dataclass(frozen=True)
class FitData:
    """The members' answers to the images for fitting weights."""

    rows: npt.NDArray[np.float32]  # (M, N, C)
    truth: npt.NDArray[np.int64]  # (N,)


def subsets_of(members: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all 2**M - 1 subsets, the smallest first, each in the members' order.

    Raises:
        ModelSetError: there are none to compare, or too many.

    """
    if not 1 < len(members) <= MAX_MEMBERS:
        raise ModelSetError(
            f"--subsets compares ensembles of 2 to {MAX_MEMBERS} members; this set has "
            f"{len(members)} ({', '.join(members)}): leave it out, or take some members away"
        )
    sizes = range(1, len(members) + 1)
    return [chosen for size in sizes for chosen in combinations(members, size)]


def candidates_of(members: Mapping[str, float], data: FitData) -> list[Candidate]:
    """Return every candidate, with the weights of logistic ones fitted to ``data``.

    ``members`` are the manifest's weights by name, in the manifest's order, as in ``data``.
    """
    names = list(members)
    candidates = []
    for chosen in subsets_of(names):
        total = sum(members[name] for name in chosen)
        shares = {name: members[name] / total for name in chosen}
        candidates.append(Candidate(shares, "average"))
        if len(chosen) > 1:
            columns = [names.index(name) for name in chosen]
            weights = fit_logistic(data.rows[columns], data.truth).tolist()
            candidates.append(Candidate(dict(zip(chosen, weights, strict=True)), "logistic"))
    return candidates


@dataclass(frozen=True)
class MemberCost:
    """The cost of one network on one thread."""

    cpu_ms: float  # per image, in batches of 8
    memory_mb: float  # 10**6 bytes by which compiling and the first run enlarged the process


def measure_costs(model_set: ModelSet, precision: Precision) -> dict[str, MemberCost]:
    """Compile and run every member separately in this process.

    All members stay compiled until the last has run, so that none reuses memory that another freed.
    Rounds of timing alternate between members, and each member's least time counts, so that other
    load on the machine affects all alike.
    """
    unmeasured = _first_of_all()
    networks: dict[str, LoadedNetwork] = {}
    grown: dict[str, int] = {}
    process = psutil.Process()
    for member in model_set.manifest.members:
        before = process.memory_info().rss
        networks[member.name] = network = _loaded(model_set, member.name, precision)
        network.warm_up()
        grown[member.name] = max(0, process.memory_info().rss - before)
    least = dict.fromkeys(networks, float("inf"))
    for _ in range(NUM_ROUNDS):
        for name, network in networks.items():
            least[name] = min(least[name], _cpu_ms(network))
    del unmeasured
    return {name: MemberCost(round(least[name], 3), round(grown[name] / 1e6, 1)) for name in least}


def _first_of_all() -> CompiledNetwork:
    """Run a small network, so that OpenVINO's own initialisation is not counted for a member."""
    pixels = ops.parameter([-1, 8, 8, 3], ov.Type.u8)
    planes = ops.transpose(ops.convert(pixels, "f32"), np.array([0, 3, 1, 2]))
    kernel = np.ones((8, 3, 3, 3), np.float32)
    features = ops.relu(ops.convolution(planes, kernel, [1, 1], [1, 1], [1, 1], [1, 1]))
    means = ops.reduce_mean(features, np.array([2, 3]), keep_dims=False)
    model = ov.Model([ops.softmax(means, 1)], [pixels], "first")
    network = CompiledNetwork(model, RuntimeOptions(batch_sizes=(BATCH,)))
    network.warm_up()
    return network


def _loaded(model_set: ModelSet, member: str, precision: Precision) -> LoadedNetwork:
    float_type = "f32" if precision == "FP16" else model_set.manifest.float_type
    options = RuntimeOptions(batch_sizes=(BATCH,), float_type=float_type)
    return load(model_set.network_path(member, precision), options)


def _cpu_ms(network: LoadedNetwork) -> float:
    size = network.fixed_batch or BATCH
    images = np.full((size, *network.input_shape), 127, np.uint8)
    started = process_time()
    network.predict(images)
    return (process_time() - started) / size * 1e3


@dataclass(frozen=True)
class SubsetScore:
    """An ensemble's results on the judging images, or the cascade's at a threshold."""

    members: tuple[str, ...]
    weights: dict[str, float]
    method: Method
    margin: float | None  # for a cascade
    top1: float
    top1_interval: tuple[float, float]  # 95 %, Wilson
    nats: float | None  # mean log-likelihood of the true class; None for a cascade
    lost: Paired  # the set as served against this one
    behind: Paired  # the best ensemble against this one
    cpu_ms: float  # per image, in the networks only
    memory_mb: float  # of the networks

    @property
    def is_as_good_as_the_best(self) -> bool:
        """Whether it is not significantly worse than the best (McNemar's test; Dietterich 1998)."""
        return self.behind.difference <= 0 or self.behind.p_value > SIGNIFICANCE

    @property
    def name(self) -> str:
        """Its name in tables and plots."""
        members = " + ".join(self.members)
        if self.margin is not None:
            return f"{members}, cascade at {self.margin:g}"
        return members if len(self.members) == 1 else f"{members}, {self.method}"


@dataclass(frozen=True)
class SubsetsResult:
    """Every ensemble of a set's members that was compared."""

    precision: Precision
    num_fitted: int  # images for fitting weights
    num_judged: int  # other images, for all figures
    manifest_weights: dict[str, float]
    costs: dict[str, MemberCost]
    scores: list[SubsetScore]  # with the cascade's thresholds, the cheapest first
    served_as: str  # the set's name in the service's settings


class Judge:
    """Collects batches; ``weights`` are the manifest's, whose average is the reference."""

    def __init__(
        self, candidates: Sequence[Candidate], weights: Mapping[str, float], cascade: CascadeTally
    ) -> None:
        linear = [c for c in candidates if c.method == "average"]
        pools = [c for c in candidates if c.method == "logistic"]
        self._candidates = [*linear, *pools]
        self._weights, self._cascade = dict(weights), cascade
        names = list(weights)
        self._linear, self._pools = _matrix(linear, names), _matrix(pools, names)
        self._nats = np.zeros(len(self._candidates))
        self._right: list[Rightness] = []  # (L + P, n) each
        self._reference: list[Rightness] = []  # (n,) each, of the set as served
        self._first: list[Rightness] = []  # (n,) each, of the first member
        self._margins: list[Probabilities] = []  # (n,) each, of the first member

    def add(self, rows: Probabilities, truth: npt.NDArray[np.int64]) -> None:
        """Add (M, n, C) rows of n images with their (n,) classes."""
        images = np.arange(len(truth))
        mixed = np.tensordot(self._linear, rows, 1)  # (L, n, C)
        pooled = np.tensordot(self._pools, log_rows(rows), 1)  # (P, n, C), not normalised
        nats = np.log(np.maximum(mixed[:, images, truth], FLOOR)).sum(axis=1)
        of_pools = pooled[:, images, truth] - logsumexp(pooled, axis=2)
        right = np.concatenate([mixed.argmax(2), pooled.argmax(2)]) == truth  # (L + P, n)
        by_name = dict(zip(self._weights, rows, strict=True))
        reference = average(by_name, self._weights).argmax(1) == truth
        self._nats += np.concatenate([nats, of_pools.sum(axis=1)])
        of_first = by_name[self._cascade.first]
        first = of_first.argmax(1) == truth
        self._cascade.add(of_first, first, reference)
        self._right.append(right)
        self._reference.append(reference)
        self._first.append(first)
        self._margins.append(margins(of_first))

    def result(
        self,
        precision: Precision,
        num_fitted: int,
        costs: Mapping[str, MemberCost],
        served_as: str,
    ) -> SubsetsResult:
        """Return every candidate's score, and the cascade's points."""
        right, reference = np.concatenate(self._right, 1), np.concatenate(self._reference)
        cpu_ms = {name: cost.cpu_ms for name, cost in costs.items()}
        curve = [p for p in self._cascade.curve(cpu_ms) if p.is_setting and p.margin is not None]
        of_curve = [self._of_cascade(point, reference) for point in curve]
        best = max([*right, *of_curve], key=np.count_nonzero)

        def score(
            each: Rightness,
            candidate: Candidate,
            cpu_ms: float,
            nats: float | None = None,
            margin: float | None = None,
        ) -> SubsetScore:
            num_right, members = int(each.sum()), tuple(candidate.weights)
            return SubsetScore(
                members=members,
                weights=candidate.weights,
                method=candidate.method,
                margin=margin,
                top1=num_right / len(each),
                top1_interval=wilson_interval(num_right, len(each)),
                nats=nats,
                lost=Paired.of(reference, each),
                behind=Paired.of(best, each),
                cpu_ms=cpu_ms,
                memory_mb=sum(costs[name].memory_mb for name in members),
            )

        scores = [
            score(each, c, sum(cpu_ms[name] for name in c.weights), float(nats) / len(each))
            for c, each, nats in zip(self._candidates, right, self._nats, strict=True)
        ]
        served = Candidate(self._weights, "average")
        scores += [
            score(each, served, point.cpu_ms_per_image, margin=point.margin)
            for point, each in zip(curve, of_curve, strict=True)
        ]
        return SubsetsResult(
            precision=precision,
            num_fitted=num_fitted,
            num_judged=len(reference),
            manifest_weights=self._weights,
            costs=dict(costs),
            scores=sorted(scores, key=by_cost),
            served_as=served_as,
        )

    def _of_cascade(self, point: CascadePoint, reference: Rightness) -> Rightness:
        """Return for each image whether the cascade is right at a point's threshold."""
        edge = EDGES[round((point.margin or 0.0) * len(EDGES))]
        is_alone = np.concatenate(self._margins) >= edge
        return np.where(is_alone, np.concatenate(self._first), reference)


def _matrix(candidates: Sequence[Candidate], names: Sequence[str]) -> Matrix:
    rows = [[candidate.weights.get(name, 0.0) for name in names] for candidate in candidates]
    return np.array(rows, np.float32).reshape(len(candidates), len(names))


def log_rows(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the logarithms of probabilities, with zeros replaced by a lower bound."""
    logs: npt.NDArray[np.float32] = np.log(np.maximum(rows, FLOOR))
    return logs


def fit_logistic(rows: npt.NDArray[np.float32], truth: npt.NDArray[np.int64]) -> Weights:
    """Return the weights (M,), 0 to ``MAX_WEIGHT``, that maximise the likelihood of the truth.

    Args:
        rows: (M, N, C) probabilities.
        truth: (N,) class indices.

    """
    logs = log_rows(rows)
    num_members, num_images, _ = logs.shape
    of_truth = logs[:, np.arange(num_images), truth].astype(np.float64)  # (M, N)

    def loss(weights: Weights) -> tuple[float, Weights]:
        scores = np.tensordot(weights.astype(np.float32), logs, 1)  # (N, C)
        total = logsumexp(scores, axis=1, keepdims=True)
        share = np.exp(scores - total)  # the pool's probabilities
        expected = np.einsum("mnc,nc->mn", logs, share, dtype=np.float64)
        value = float(np.mean(total[:, 0] - weights @ of_truth))
        return value, (expected - of_truth).mean(axis=1)

    start = np.full(num_members, 1 / num_members)
    bounds = [(0.0, MAX_WEIGHT)] * num_members
    minimum: Any = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
    weights: Weights = np.asarray(minimum.x, np.float64)
    # Weights that are all zero would ignore the members.
    return weights if weights.sum() > 0 else start


def pareto_front(scores: Sequence[SubsetScore]) -> list[SubsetScore]:
    """Return the scores that no other score beats, the cheapest first.

    A score beats another if it is no worse in top-1, CPU time and memory, and better in at least
    one of them. Among equals only the first by cost and simplicity is kept.
    """
    front: list[SubsetScore] = []
    for score in sorted(scores, key=by_cost):
        if not any(_is_as_good(other, score) for other in front):
            front.append(score)
    return front


def cheapest_as_good(scores: Sequence[SubsetScore]) -> SubsetScore:
    """Return the cheapest score that is not significantly worse than the best."""
    return min((score for score in scores if score.is_as_good_as_the_best), key=by_cost)


def by_cost(score: SubsetScore) -> tuple[float, float, float, int, int]:
    """Sort by cost, then accuracy, memory and simplicity."""
    of_method = PREFERENCE.index(score.method)
    is_cascade = score.margin is not None
    return score.cpu_ms, -score.top1, score.memory_mb, is_cascade, of_method


def _is_as_good(first: SubsetScore, second: SubsetScore) -> bool:
    return (
        first.top1 >= second.top1
        and first.cpu_ms <= second.cpu_ms
        and first.memory_mb <= second.memory_mb
    )


def is_for_fitting(path: Path) -> bool:
    """Whether an image belongs to the half for fitting weights."""
    try:
        digest = sha256_of(path)
    except ModelSetError:  # unreadable, which is listed later
        digest = hashlib.sha256(str(path).encode("utf-8", "replace")).hexdigest()
    return int(digest[:8], 16) % 2 == 0


def split(images: Sequence[LabelledImage]) -> tuple[list[LabelledImage], list[LabelledImage]]:
    """Return the images for fitting and those for judging, each in their original order."""
    to_fit: list[LabelledImage] = []
    to_judge: list[LabelledImage] = []
    for image in images:
        (to_fit if is_for_fitting(image.path) else to_judge).append(image)
    return to_fit, to_judge


class SubsetStudy:
    """Every subset of a set's members, averaged and with fitted weights of the logarithms.

    Args:
        manifest: the set's; all members must have ``precision``.
        precision: of the compared networks.
        costs: of each member.
        served_as: the set's name in the service's settings.

    """

    def __init__(
        self,
        manifest: Manifest,
        precision: Precision,
        costs: dict[str, MemberCost],
        served_as: str,
    ) -> None:
        self._weights = manifest.weights
        subsets_of(list(self._weights))  # raises if there are too many
        self._precision, self._costs, self._served_as = precision, costs, served_as
        self._to_fit: frozenset[LabelledImage] = frozenset()
        self._rows: list[Probabilities] = []  # (M, n, C) each
        self._truth: list[npt.NDArray[np.int64]] = []
        self._num_values = 0
        self._num_fitted = 0
        self._judge: Judge | None = None

    def ordered(self, images: Sequence[LabelledImage]) -> list[LabelledImage]:
        """Return the images in the order in which :meth:`add` must get them.

        Raises:
            ModelSetError: there are too few for two halves.

        """
        to_fit, to_judge = split(images)
        if not to_fit or not to_judge:
            raise ModelSetError(
                f"--subsets fits weights on one half of the images and judges on the other: "
                f"{len(images)} are too few; give more"
            )
        self._to_fit = frozenset(to_fit)
        return to_fit + to_judge

    def add(self, batch: AnsweredBatch[LabelledImage]) -> None:
        """Add a batch: for fitting, or for judging after the last one for fitting."""
        rows = batch.probabilities.get(self._precision)
        if not rows:
            return
        stacked = np.stack([rows[name] for name in self._weights])  # (M, n, C)
        truth = truth_of(batch.images)
        is_fitted = np.array([image in self._to_fit for image in batch.images])
        if is_fitted.any():
            self._keep(stacked[:, is_fitted], truth[is_fitted])
        if not is_fitted.all() and self._num_fitted:
            if self._judge is None:
                self._judge = self._fitted()
            self._judge.add(stacked[:, ~is_fitted], truth[~is_fitted])

    def result(self) -> SubsetsResult:
        """Return the comparison.

        Raises:
            ModelSetError: no image of a half could be read.

        """
        if self._judge is None:
            raise ModelSetError(
                "--subsets fits weights on one half of the images and judges on the other: of "
                "one of them none can be read; give more images"
            )
        return self._judge.result(self._precision, self._num_fitted, self._costs, self._served_as)

    def _keep(self, rows: Probabilities, truth: npt.NDArray[np.int64]) -> None:
        if not self._rows or self._num_values + rows.size <= MAX_KEPT_VALUES:
            self._rows.append(rows)
            self._truth.append(truth)
            self._num_values += rows.size
            self._num_fitted += len(truth)

    def _fitted(self) -> Judge:
        """Fit every candidate's weights, and drop the rows kept for that."""
        rows, truth = np.concatenate(self._rows, axis=1), np.concatenate(self._truth)
        candidates = candidates_of(self._weights, FitData(rows, truth))
        self._rows, self._truth = [], []
        return Judge(candidates, self._weights, CascadeTally(list(self._weights)))
