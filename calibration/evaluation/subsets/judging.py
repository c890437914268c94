"""Counts how every candidate does on images that its weights were not fitted to."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp

from calibration.evaluation.cascade import CascadeTally
from calibration.evaluation.subsets.candidates import Candidate
from calibration.evaluation.subsets.costs import MemberCost
from calibration.evaluation.subsets.logistic import FLOOR, log_rows
from calibration.evaluation.subsets.scores import SubsetScore, SubsetsResult
from calibration.statistics import Paired
from models.ensemble import Probabilities, average
from models.record import Precision

Matrix = npt.NDArray[np.float32]


class Judge:
    """Adds batches; ``weights`` are the manifest's, whose average is the reference."""

    def __init__(
        self, candidates: Sequence[Candidate], weights: Mapping[str, float], cascade: CascadeTally
    ) -> None:
        linear = [c for c in candidates if c.method == "average"]
        pools = [c for c in candidates if c.method == "logistic"]
        self._candidates = [*linear, *pools]
        self._weights, self._cascade = dict(weights), cascade
        names = list(weights)
        self._linear, self._pools = _matrix(linear, names), _matrix(pools, names)
        self._num_right = np.zeros(len(self._candidates), np.int64)
        self._nats = np.zeros(len(self._candidates))
        self._against = [Paired() for _ in self._candidates]
        self._num_images = 0

    def add(self, rows: Probabilities, truth: npt.NDArray[np.int64]) -> None:
        """Count (M, n, C) rows of n images, against (n,) classes."""
        images = np.arange(len(truth))
        mixed = np.tensordot(self._linear, rows, 1)  # (L, n, C)
        pooled = np.tensordot(self._pools, log_rows(rows), 1)  # (P, n, C), not normalised
        nats = np.log(np.maximum(mixed[:, images, truth], FLOOR)).sum(axis=1)
        of_pools = pooled[:, images, truth] - logsumexp(pooled, axis=2)
        right = np.concatenate([mixed.argmax(2), pooled.argmax(2)]) == truth  # (L + P, n)
        by_name = dict(zip(self._weights, rows, strict=True))
        reference = average(by_name, self._weights).argmax(1) == truth
        self._num_images += len(truth)
        self._num_right += right.sum(axis=1)
        self._nats += np.concatenate([nats, of_pools.sum(axis=1)])
        for pair, each in zip(self._against, right, strict=True):
            pair.add(reference, each)
        first = self._cascade.first
        self._cascade.add(by_name[first], by_name[first].argmax(1) == truth, reference)

    def result(
        self, precision: Precision, num_fitted: int, costs: Mapping[str, MemberCost]
    ) -> SubsetsResult:
        """Return every candidate's score, and the cascade's points."""
        scores = [
            SubsetScore.of(
                candidate,
                int(self._num_right[index]),
                self._num_images,
                float(self._nats[index]) / self._num_images,
                self._against[index],
                costs,
            )
            for index, candidate in enumerate(self._candidates)
        ]
        cpu_ms = {name: cost.cpu_ms for name, cost in costs.items()}
        curve = [point for point in self._cascade.curve(cpu_ms) if point.is_setting]
        memory_mb = sum(cost.memory_mb for cost in costs.values())
        return SubsetsResult(
            precision=precision,
            num_fitted=num_fitted,
            num_judged=self._num_images,
            manifest_weights=self._weights,
            costs=dict(costs),
            scores=scores,
            cascade=[point for point in curve if point.margin is not None],
            cascade_memory_mb=memory_mb,
        )


def _matrix(candidates: Sequence[Candidate], names: Sequence[str]) -> Matrix:
    rows = [[candidate.weights.get(name, 0.0) for name in names] for candidate in candidates]
    return np.array(rows, np.float32).reshape(len(candidates), len(names))
