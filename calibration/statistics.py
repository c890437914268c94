"""Statistics of a measured accuracy: intervals, paired tests, calibration error.

Everything works on counts, so memory does not grow with the images.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from models.accuracy import Z95, Drop

Rightness = npt.NDArray[np.bool_]  # (N,), whether each image's likeliest class is right
EDGE = 1e-9  # margin of the search for an interval before a difference of all images
NUM_BINS = 15  # of confidence, as in Guo et al. (2017)


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
