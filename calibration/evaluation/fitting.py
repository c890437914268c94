"""Fits what a set says of its confidence: the bound of sure answers, and temperatures.

Both are fitted on half of the images, by a hash of each file, and judged on the other half, so that
the reported figures are unbiased.

The bound is the lowest probability of the first class above which at least the requested share is
right, by the lower end of the 95 % interval. A temperature divides the logits (Guo et al., 2017):
it changes a member's confidence, not its classes. Each member gets one, then their average, which
may give other classes when its members' confidence changes.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
import numpy.typing as npt

from calibration.datasets import LabelledImage, truth_of
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.subsets import is_for_fitting
from calibration.statistics import Reliability
from models.ensemble import Probabilities, average, tempered
from models.errors import ModelSetError
from models.manifest import ENSEMBLE, Manifest, SureRecord, wilson_interval
from models.record import Precision

MIN_IMAGES = 100  # sure images in each half
NUM_BOUNDS = 1000  # a bound has three decimals
LOWEST, HIGHEST = 0.2, 20.0  # as in manifests
NUM_SECTIONS = 40  # of the golden section, each of which leaves 0.62 of the interval
FLOOR = 1e-30  # bounds a probability before its logarithm
Classes = npt.NDArray[np.int64]


class SureFit:
    """Counts by the first class's probability, for each half: all images, and those that are right.

    Args:
        precision: of the networks.
        target: the required share of right answers among sure ones, 0 to 1.

    """

    def __init__(self, precision: Precision, target: float) -> None:
        self._precision: Precision = precision
        self._target = target
        self._edges = np.arange(NUM_BOUNDS, dtype=np.float32) / np.float32(NUM_BOUNDS)
        self._counts = np.zeros((2, 2, NUM_BOUNDS), np.int64)  # [fitted to, right, step]
        self._lock = threading.Lock()  # batches come from several threads

    def add(self, batch: AnsweredBatch[LabelledImage]) -> None:
        """Count a batch."""
        if not batch.images:
            return
        rows = batch.probabilities[self._precision][ENSEMBLE]  # (N, C)
        is_fitted = [int(is_for_fitting(image.path)) for image in batch.images]
        is_right = (rows.argmax(axis=1) == truth_of(batch.images)).astype(int)
        steps = np.searchsorted(self._edges, rows.max(axis=1), side="right") - 1
        with self._lock:
            np.add.at(self._counts, (is_fitted, is_right, steps), 1)

    def result(self) -> SureRecord:
        """Choose the bound and judge it on the other half.

        Raises:
            ModelSetError: no bound reaches the target, or there are too few images.

        """
        wrong, right = self._counts[:, :, ::-1].cumsum(axis=2)[:, :, ::-1].swapaxes(0, 1)
        num_sure = wrong + right  # (half, step): images with at least that probability
        steps = np.flatnonzero(num_sure.min(axis=0) >= MIN_IMAGES)
        chosen_on = zip(right[1, steps].tolist(), num_sure[1, steps].tolist(), strict=True)
        is_enough = [wilson_interval(*counts)[0] >= self._target for counts in chosen_on]
        if not any(is_enough):
            raise ModelSetError(
                f"--sure-at {self._target:g}: no probability leaves {MIN_IMAGES} images in each "
                f"half, of {num_sure[1, 0]} and {num_sure[0, 0]}, that show it; "
                "give more images, or ask for less"
            )
        step = int(steps[is_enough.index(True)])
        num_images, num_judged = int(num_sure[0, 0]), int(num_sure[0, step])
        low, high = wilson_interval(int(right[0, step]), num_judged)
        return SureRecord(
            probability=step / NUM_BOUNDS,
            target=self._target,
            num_images=num_images,
            share=round(num_judged / num_images, 4),
            right=round(int(right[0, step]) / num_judged, 4),
            right_interval=(round(low, 4), round(high, 4)),
        )


@dataclass(frozen=True)
class Judged:
    """The calibration of a classifier on images that were not used for fitting."""

    top1: float
    calibration_error: float
    log_likelihood: float  # mean, in nats

    @classmethod
    def of(cls, rows: Probabilities, truth: Classes) -> "Judged":
        """Judge float32 (N, C) against (N,) classes."""
        right, reliability = rows.argmax(1) == truth, Reliability()
        reliability.add(rows.max(axis=1), right)
        nats = float(np.log(np.maximum(rows[np.arange(len(truth)), truth], FLOOR)).mean())
        return cls(float(right.mean()), reliability.expected_calibration_error, nats)


@dataclass(frozen=True)
class Fitted:
    """Temperatures by member and ``ensemble``, and their effect on images not used for fitting."""

    temperatures: Mapping[str, float]
    num_fitted: int
    num_judged: int
    before: Mapping[str, Judged]
    after: Mapping[str, Judged]


def fit_temperature(rows: Probabilities, truth: Classes) -> float:
    """Return the temperature with the highest likelihood of (N,) classes by (N, C) probabilities.

    The likelihood is concave in the inverse temperature, so a golden section search finds its
    maximum.
    """
    logits = np.log(np.maximum(rows, FLOOR))

    def loss(log_temperature: float) -> float:
        scaled = logits / exp(log_temperature)
        most = scaled.max(axis=1, keepdims=True)
        total = np.log(np.exp(scaled - most).sum(axis=1)) + most[:, 0]
        return float((total - scaled[np.arange(len(truth)), truth]).mean())

    low, high, share = log(LOWEST), log(HIGHEST), (sqrt(5) - 1) / 2
    left, right = high - share * (high - low), low + share * (high - low)
    of_left, of_right = loss(left), loss(right)
    for _ in range(NUM_SECTIONS):
        if of_left <= of_right:  # if all are right, any low temperature is optimal
            high, right, of_right = right, left, of_left
            left = high - share * (high - low)
            of_left = loss(left)
        else:
            low, left, of_left = left, right, of_right
            right = low + share * (high - low)
            of_right = loss(right)
    return round(exp((low + high) / 2), 4)


class TemperatureFit:
    """Collects the rows of a set whose temperatures are all 1, then fits temperatures."""

    def __init__(self, manifest: Manifest, precision: Precision) -> None:
        self._precision: Precision = precision
        self._weights = manifest.weights
        self._parts: list[tuple[npt.NDArray[np.bool_], Classes, dict[str, Probabilities]]] = []

    def add(self, batch: AnsweredBatch[LabelledImage]) -> None:
        """Keep a batch's rows: 4 bytes per class, member and image."""
        if not batch.images:
            return
        is_fitted = np.array([is_for_fitting(image.path) for image in batch.images])
        rows = batch.probabilities[self._precision]
        members = {name: rows[name] for name in self._weights}
        self._parts.append((is_fitted, truth_of(batch.images), members))

    def result(self) -> Fitted:
        """Fit the temperatures on one half of the images, and judge them on the other.

        Raises:
            ModelSetError: there are too few images.

        """
        is_fitted = np.concatenate([part[0] for part in self._parts])
        truth = np.concatenate([part[1] for part in self._parts])
        rows = {name: np.concatenate([p[2][name] for p in self._parts]) for name in self._weights}
        if min(is_fitted.sum(), (~is_fitted).sum()) < MIN_IMAGES:
            raise ModelSetError(
                f"--calibrate has {is_fitted.sum()} images to fit to and "
                f"{(~is_fitted).sum()} to judge with: give at least {MIN_IMAGES} of each"
            )
        fitted = {n: fit_temperature(r[is_fitted], truth[is_fitted]) for n, r in rows.items()}
        after = {name: tempered(of, fitted[name]) for name, of in rows.items()}
        mean = average(after, self._weights)
        fitted[ENSEMBLE] = fit_temperature(mean[is_fitted], truth[is_fitted])
        before = rows | {ENSEMBLE: average(rows, self._weights)}
        after |= {ENSEMBLE: tempered(mean, fitted[ENSEMBLE])}
        judge, of_truth = ~is_fitted, truth[~is_fitted]
        return Fitted(
            fitted,
            int(is_fitted.sum()),
            int(judge.sum()),
            {name: Judged.of(of[judge], of_truth) for name, of in before.items()},
            {name: Judged.of(of[judge], of_truth) for name, of in after.items()},
        )


def with_temperatures(manifest: Manifest, temperatures: Mapping[str, float]) -> Manifest:
    """Return the manifest with these temperatures, by member and ``ensemble``.

    It removes the bound of sure answers, which was measured with other probabilities.
    """
    members = tuple(
        member.model_copy(update={"temperature": temperatures[member.name]})
        for member in manifest.members
    )
    update = {"members": members, "temperature": temperatures[ENSEMBLE], "sure": None}
    return manifest.model_copy(update=update)
