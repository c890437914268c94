"""Measures every candidate on images that its weights were not fitted to.

It keeps a byte per image and ensemble, whether it was right, since each is compared with the best.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp

from calibration.evaluation.cascade import EDGES, CascadePoint, CascadeTally
from calibration.evaluation.subsets.candidates import Candidate
from calibration.evaluation.subsets.costs import MemberCost
from calibration.evaluation.subsets.logistic import FLOOR, log_rows
from calibration.evaluation.subsets.scores import SubsetScore, SubsetsResult, by_cost
from calibration.statistics import Paired, Rightness
from models.accuracy import wilson_interval
from models.ensemble import Probabilities, average, margins
from models.record import Precision

Matrix = npt.NDArray[np.float32]


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
