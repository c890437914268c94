"""Statistics of a measured accuracy: counts, intervals, paired tests, calibration error, cascades.

Everything works on counts, so memory grows with classes, not with images.

A cascade's accuracy and CPU time are estimated for each threshold: the first member answers alone
if its margin is at least the threshold (``app.graph.members``). Images are counted in bins of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from models.ensemble import Probabilities, margins
from models.manifest import Z95, Drop, Score, wilson_interval

Rightness = npt.NDArray[np.bool_]  # (N,), whether each image's likeliest class is right
EDGE = 1e-9  # margin of the search for an interval before a difference of all images
NUM_BINS = 15  # of confidence, as in Guo et al. (2017)
Indices = npt.NDArray[np.int64]
NUM_THRESHOLDS = 1000  # a threshold is a bin's lower edge: three decimals
EDGES = np.arange(NUM_THRESHOLDS, dtype=np.float32) / np.float32(NUM_THRESHOLDS)
STEPS = range(NUM_THRESHOLDS // 10, NUM_THRESHOLDS, NUM_THRESHOLDS // 10)
SUGGESTED_WITHIN = 0.005  # of the ensemble's top-1, a fraction


@dataclass
class Paired:
    """Two classifiers on the same images: how often only one of them was right."""

    num_images: int = 0
    only_first: int = 0
    only_second: int = 0

    @classmethod
    def of(cls, first: Rightness, second: Rightness) -> "Paired":
        """Return the counts of two arrays (N,), whether each image is right."""
        pair = cls()
        pair.add(first, second)
        return pair

    def add(self, first: Rightness, second: Rightness) -> None:
        """Add a batch of two arrays (N,), whether each image is right."""
        self.num_images += len(first)
        self.only_first += int((first & ~second).sum())
        self.only_second += int((~first & second).sum())

    @property
    def difference(self) -> float:
        """The first's accuracy minus the second's."""
        return (self.only_first - self.only_second) / self.num_images

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % score interval of the difference (Tango 1998, Statistics in Medicine 17).

        It keeps its level with few images and few differences. Intervals that add half an image to
        each count are too short there: 50 images without a difference do not prove that there is
        none.
        """
        from scipy.optimize import brentq  # slow to import, and only needed for comparisons

        ends = -1 + EDGE, 1 - EDGE
        low, high = (
            brentq(self._score, *ends, args=(z,))
            if self._score(ends[0], z) > 0 > self._score(ends[1], z)
            else end
            for z, end in ((Z95, -1.0), (-Z95, 1.0))
        )
        return min(low, self.difference), max(high, self.difference)

    def _score(self, difference: float, z: float) -> float:
        """Return how far Tango's score of a difference exceeds ``z``.

        It decreases with the difference.
        """
        n, b, c = self.num_images, self.only_first, self.only_second
        # The likeliest share of images on which only the second is right, given this difference.
        linear = (2 * n - b + c) * difference - b - c
        root = linear**2 + 8 * n * c * difference * (1 - difference)
        share = max(0.0, (sqrt(max(0.0, root)) - linear) / (4 * n))
        variance = n * (2 * share + difference * (1 - difference))
        return (b - c - n * difference) / sqrt(max(variance, EDGE**2)) - z

    @property
    def p_value(self) -> float:
        """Return the p-value of McNemar's exact test: the chance of so uneven a split of equals."""
        from scipy.stats import binomtest

        discordant = self.only_first + self.only_second
        if discordant == 0:
            return 1.0
        return float(binomtest(self.only_first, discordant).pvalue)

    @property
    def drop(self) -> Drop:
        """Return the second's loss in the form of accuracy records."""
        low, high = self.interval
        return Drop(
            top1=round(self.difference, 6),
            interval=(round(low, 4), round(high, 4)),
            p_value=round(self.p_value, 4),
        )


@dataclass
class Reliability:
    """Confidence against accuracy, in bins of confidence."""

    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    right: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    confidence: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_BINS))

    def add(self, confidence: npt.NDArray[Any], right: Rightness) -> None:
        """Add a batch: (N,) probability of the first class, (N,) whether it was right."""
        bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
        self.counts += np.bincount(bins, minlength=NUM_BINS)
        self.right += np.bincount(bins, weights=right, minlength=NUM_BINS).astype(np.int64)
        self.confidence += np.bincount(bins, weights=confidence, minlength=NUM_BINS)

    @property
    def expected_calibration_error(self) -> float:
        """Mean difference of confidence and accuracy over the images (ECE; Naeini et al. 2015)."""
        total = int(self.counts.sum())
        return float(np.abs(self.right - self.confidence).sum() / total) if total else 0.0


class Tally:
    """Counts of a classifier: a member, or the ensemble."""

    def __init__(self, num_classes: int) -> None:
        self.num_images = self.num_right = self.num_right_top5 = 0
        self.confusion = np.zeros((num_classes, num_classes), np.int32)  # [truth, answer]
        self.reliability = Reliability()

    def add(self, probabilities: Probabilities, truth: Indices) -> Rightness:
        """Count float32 (N, C) against (N,) class indices; return whether each was right."""
        answer = probabilities.argmax(axis=1)
        right: Rightness = answer == truth
        of_truth = probabilities[np.arange(len(truth)), truth]
        # An image's rank is the number of classes before it; ties go to the lower index, as in
        # top_k.
        before = (probabilities > of_truth[:, None]).sum(axis=1)
        ties = (probabilities == of_truth[:, None]) & (
            np.arange(probabilities.shape[1]) < truth[:, None]
        )
        self.num_images += len(truth)
        self.num_right += int(right.sum())
        self.num_right_top5 += int((before + ties.sum(axis=1) < 5).sum())
        np.add.at(self.confusion, (truth, answer), 1)
        self.reliability.add(probabilities.max(axis=1), right)
        return right

    @property
    def top1(self) -> float:
        """The share of images whose likeliest class is right."""
        return self.num_right / self.num_images

    @property
    def score(self) -> Score:
        """Return the figures for the record."""
        low, high = wilson_interval(self.num_right, self.num_images)
        return Score(
            top1=round(self.top1, 4),
            top1_interval=(round(low, 4), round(high, 4)),
            top5=round(self.num_right_top5 / self.num_images, 4),
            calibration_error=round(self.reliability.expected_calibration_error, 4),
        )

    def class_accuracy(self) -> list[float | None]:
        """Return the top-1 within each class; None for a class without images."""
        totals, right = self.confusion.sum(axis=1), self.confusion.diagonal()
        return [int(r) / int(n) if n else None for r, n in zip(right, totals, strict=True)]


class SureTally:
    """Counts the ensemble's sure answers: those whose first class reaches the bound."""

    def __init__(self, sure_from: float) -> None:
        self._sure_from = np.float32(sure_from)
        self.num_images = self.num_sure = self.num_right = 0

    def add(self, probabilities: Probabilities, right: Rightness) -> None:
        """Add a batch: float32 (N, C), and whether each of (N,) was right."""
        is_sure = probabilities.max(axis=1) >= self._sure_from
        self.num_images += len(right)
        self.num_sure += int(is_sure.sum())
        self.num_right += int((is_sure & right).sum())

    def figures(self) -> dict[str, Any]:
        """Return the share of sure answers, and of right ones among them with its interval."""
        if not self.num_sure:
            return {"share": 0.0, "right": None, "right_interval": None}
        interval = wilson_interval(self.num_right, self.num_sure)
        return {
            "share": round(self.num_sure / self.num_images, 4),
            "right": round(self.num_right / self.num_sure, 4),
            "right_interval": [round(bound, 4) for bound in interval],
        }


@dataclass(frozen=True)
class CascadePoint:
    """The accuracy and cost of one margin on the measured images."""

    margin: float | None  # None: members are never skipped; 0: always
    top1: float
    top1_interval: tuple[float, float]  # 95 %, Wilson
    lost: Paired  # all members on every image, against the cascade
    share_skipped: float  # of the images
    cpu_ms_per_image: float  # of the networks

    @property
    def is_setting(self) -> bool:
        """Whether the application accepts this margin as ``cascade_margin``."""
        return self.margin is None or self.margin > 0


class CascadeTally:
    """Counts, by the first member's margin, whether it and the ensemble were right."""

    def __init__(self, members: Sequence[str]) -> None:
        self.first, *self.others = members
        self._counts = np.zeros(
            (2, 2, NUM_THRESHOLDS), np.int64
        )  # [first right, ensemble right, bin]

    def add(self, probabilities: Probabilities, first: Rightness, ensemble: Rightness) -> None:
        """Add a batch of N images.

        Args:
            probabilities: the first member's, (N, C).
            first: whether the first member is right, (N,).
            ensemble: whether the ensemble is right, (N,).

        """
        bins = np.searchsorted(EDGES, margins(probabilities), side="right") - 1
        np.add.at(self._counts, (first.astype(int), ensemble.astype(int), bins), 1)

    def curve(self, cpu_ms: Mapping[str, float]) -> list[CascadePoint]:
        """Return points from never to always skipping.

        The thresholds between are in steps of 0.1, and those that a tenth, two tenths ... of the
        images reach. ``cpu_ms`` is each member's CPU-ms per image.
        """
        of_bin = self._counts.sum(axis=(0, 1))
        passed = of_bin[::-1].cumsum()[::-1]  # images at or above each bin's edge, which decreases
        targets = np.arange(1, 10) * passed[0] / 10
        quantiles = (int((passed >= target).sum()) - 1 for target in targets)
        chosen = sorted({0, *STEPS, *quantiles}, reverse=True)
        return [self._at(index, cpu_ms) for index in (NUM_THRESHOLDS, *chosen)]

    def _at(self, index: int, cpu_ms: Mapping[str, float]) -> CascadePoint:
        """Return the point whose threshold is the lower edge of bin ``index``."""
        num_images = int(self._counts.sum())
        skipped, asked = self._counts[:, :, index:], self._counts[:, :, :index]
        num_right = int(skipped[1].sum() + asked[:, 1].sum())
        share = int(skipped.sum()) / num_images
        others = sum(cpu_ms[name] for name in self.others)
        return CascadePoint(
            None if index == NUM_THRESHOLDS else index / NUM_THRESHOLDS,
            num_right / num_images,
            wilson_interval(num_right, num_images),
            Paired(num_images, int(skipped[0, 1].sum()), int(skipped[1, 0].sum())),
            share,
            cpu_ms[self.first] + (1 - share) * others,
        )


def cheapest_within(points: Sequence[CascadePoint], allowed: float) -> CascadePoint:
    """Return the cheapest point that loses at most ``allowed`` of the ensemble's top-1."""
    near = [p for p in points if p.is_setting and p.lost.difference <= allowed]
    return min(near, key=lambda point: (point.cpu_ms_per_image, -point.top1))
