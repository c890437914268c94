"""Statistics of a measured accuracy: counts, intervals, paired tests, calibration error, modes.

Everything works on counts, so memory grows with classes, not with images.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from models.ensemble import Probabilities
from models.record import Z95, Drop, Score, wilson_interval

Rightness = npt.NDArray[np.bool_]  # (N,), whether each image's likeliest class is right
EDGE = 1e-9  # margin of the search for an interval before a difference of all images
NUM_BINS = 15  # of confidence, as in Guo et al. (2017)
Indices = npt.NDArray[np.int64]


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


class ModeTally:
    """Counts the answers of one mode: all members, a step of the plan, some members alone.

    ``sure_from`` and ``set_from`` are its bounds (:class:`models.ensemble.Trust`).
    """

    def __init__(self, sure_from: float | None, set_from: float | None) -> None:
        self.sure_from, self._set_from = sure_from, set_from
        self.num_images = self.num_right = self.num_sure = self.num_sure_right = 0
        self._num_held = self._num_listed = 0

    def add(self, rows: Probabilities, truth: Indices) -> None:
        """Add a batch: float32 (N, C), and the class of each image, (N,)."""
        right = rows.argmax(axis=1) == truth
        self.num_images += len(truth)
        self.num_right += int(right.sum())
        if self.sure_from is not None:
            is_sure = rows.max(axis=1) >= np.float32(self.sure_from)
            self.num_sure += int(is_sure.sum())
            self.num_sure_right += int((is_sure & right).sum())
        if self._set_from is not None and len(truth):
            is_in = rows >= np.float32(self._set_from)
            is_in[np.arange(len(truth)), rows.argmax(axis=1)] = True
            self._num_held += int(is_in[np.arange(len(truth)), truth].sum())
            self._num_listed += int(is_in.sum())

    def figures(self) -> dict[str, Any]:
        """Return the figures for JSON; shares are None without images or without a bound."""
        sure = answer_set = None
        if self.sure_from is not None and self.num_images:
            interval = wilson_interval(self.num_sure_right, self.num_sure) if self.num_sure else ()
            sure = {
                "from": self.sure_from,
                "share": round(self.num_sure / self.num_images, 4),
                "right": round(self.num_sure_right / self.num_sure, 4) if self.num_sure else None,
                "right_interval": [round(bound, 4) for bound in interval],
            }
        if self._set_from is not None and self.num_images:
            answer_set = {
                "from": self._set_from,
                "coverage": round(self._num_held / self.num_images, 4),
                "mean_size": round(self._num_listed / self.num_images, 3),
            }
        top1 = round(self.num_right / self.num_images, 4) if self.num_images else None
        return {"num_images": self.num_images, "top1": top1, "sure": sure, "answer_set": answer_set}
