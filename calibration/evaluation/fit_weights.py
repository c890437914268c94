"""Fits the ensemble's weights on half of the images and compares them with the plain average.

The ensemble's probability of the true class is linear in the weights, so its likelihood is that of
a mixture, concave in the weights: expectation-maximisation climbs to the one maximum.
"""

from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import numpy.typing as npt

from calibration.evaluation.inference import PredictedBatch
from calibration.statistics import Z95, Paired
from models.accuracy import ENSEMBLE
from models.ensemble import average
from models.record import Precision

FLOOR = 1e-12  # a probability of zero would make the likelihood of all images zero


def fit_mixture(
    of_truth: npt.NDArray[np.float64], num_steps: int = 2000, tolerance: float = 1e-9
) -> npt.NDArray[np.float64]:
    """Return the weights (M,), summing to one, that maximise the likelihood.

    ``of_truth`` (N, M): each member's probability of each image's true class.
    """
    weights: npt.NDArray[np.float64] = np.full(of_truth.shape[1], 1 / of_truth.shape[1])
    for _ in range(num_steps):
        shares = np.maximum(of_truth, FLOOR) * weights
        updated: npt.NDArray[np.float64] = (shares / shares.sum(axis=1, keepdims=True)).mean(axis=0)
        if np.abs(updated - weights).max() < tolerance:
            return updated
        weights = updated
    return weights


@dataclass(frozen=True)
class FittedWeights:
    """The weights, and how they did on images that they were not fitted to."""

    precision: Precision
    weights: dict[str, float]  # sum to one
    num_fitted: int
    num_judged: int
    gain_nats: float  # mean log-likelihood, fitted minus plain average
    gain_interval: tuple[float, float]  # 95 %
    top1_plain: float
    top1_fitted: float
    top1_difference: float  # fitted minus plain
    top1_interval: tuple[float, float]
    p_value: float  # McNemar's, of top-1

    @property
    def is_better(self) -> bool:
        """Whether the gain in likelihood is more than chance, and top-1 no worse."""
        return self.gain_interval[0] > 0 and self.top1_difference >= 0


@dataclass
class WeightFit:
    """Collects the first ``num_to_fit`` images' likelihoods, then judges on the rest."""

    precision: Precision
    num_to_fit: int
    names: list[str] = field(default_factory=list)
    _seen: list[npt.NDArray[np.float64]] = field(default_factory=list)
    _num_seen: int = 0
    _weights: dict[str, float] | None = None
    _gains: list[npt.NDArray[np.float64]] = field(default_factory=list)
    _paired: Paired = field(default_factory=Paired)
    _num_right: list[int] = field(default_factory=lambda: [0, 0])  # plain, fitted

    def add(self, batch: PredictedBatch) -> None:
        """Take a batch: to fit on, or to judge with once enough were seen."""
        rows = batch.probabilities.get(self.precision)
        if not rows:
            return
        members = {name: rows[name] for name in rows if name != ENSEMBLE}
        picked = np.arange(len(batch.truth)), batch.truth
        of_truth = np.stack([p[picked] for p in members.values()], axis=1).astype(np.float64)
        if self._num_seen < max(self.num_to_fit, 1):
            self.names = list(members)
            self._seen.append(of_truth)
            self._num_seen += len(of_truth)
            return
        if self._weights is None:
            fitted = fit_mixture(np.concatenate(self._seen))
            self._weights = dict(zip(self.names, (float(w) for w in fitted), strict=True))
        plain = average(members, dict.fromkeys(members, 1.0))
        mixed = average(members, self._weights)
        logs = [np.log(np.maximum(p[picked].astype(np.float64), FLOOR)) for p in (mixed, plain)]
        self._gains.append(logs[0] - logs[1])
        right = [p.argmax(axis=1) == batch.truth for p in (plain, mixed)]
        self._paired.add(right[1], right[0])
        self._num_right = [n + int(r.sum()) for n, r in zip(self._num_right, right, strict=True)]

    def result(self) -> FittedWeights | None:
        """Return the outcome; None if there were too few images to judge: an interval needs two."""
        gains = np.concatenate(self._gains) if self._gains else np.empty(0)
        if self._weights is None or len(gains) < 2:
            return None
        half = Z95 * float(gains.std(ddof=1)) / sqrt(len(gains))
        mean = float(gains.mean())
        return FittedWeights(
            precision=self.precision,
            weights=self._weights,
            num_fitted=self._num_seen,
            num_judged=len(gains),
            gain_nats=mean,
            gain_interval=(mean - half, mean + half),
            top1_plain=self._num_right[0] / len(gains),
            top1_fitted=self._num_right[1] / len(gains),
            top1_difference=self._paired.difference,
            top1_interval=self._paired.interval,
            p_value=self._paired.p_value,
        )
