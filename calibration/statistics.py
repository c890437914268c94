"""Statistics of a measured accuracy: intervals, paired tests, calibration error.

Everything works on counts, so an evaluation needs no memory per image.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.stats import binomtest

from models.accuracy import Z95, Drop

Rightness = npt.NDArray[np.bool_]  # (N,), whether each image's likeliest class is right
EDGE = 1e-9  # how near the search for an interval goes to differences of all images
NUM_BINS = 15  # of confidence, as Guo et al. (2017) have them


def wilson_interval(num_right: int, num_images: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson 1927): sound near 0 and 1 too."""
    share, spread = num_right / num_images, Z95**2 / num_images
    center = (share + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * sqrt(share * (1 - share) / num_images + spread / 4 / num_images)
    return max(0.0, center - half), min(1.0, center + half)


@dataclass
class Paired:
    """Two classifiers on the same images: who alone was right, how often."""

    num_images: int = 0
    only_first: int = 0
    only_second: int = 0

    @classmethod
    def of(cls, first: Rightness, second: Rightness) -> "Paired":
        """Return the counts of (N,) right-or-wrong."""
        pair = cls()
        pair.add(first, second)
        return pair

    def add(self, first: Rightness, second: Rightness) -> None:
        """Count a batch of (N,) right-or-wrong."""
        self.num_images += len(first)
        self.only_first += int((first & ~second).sum())
        self.only_second += int((~first & second).sum())

    @property
    def difference(self) -> float:
        """First's accuracy minus second's."""
        return (self.only_first - self.only_second) / self.num_images

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % score interval of the difference (Tango 1998, Statistics in Medicine 17).

        It holds its level on few images and few differences, where those that add half an image to
        each count are too short: 50 images without a difference do not show that there is none.
        """
        ends = -1 + EDGE, 1 - EDGE
        low, high = (
            brentq(self._score, *ends, args=(z,))
            if self._score(ends[0], z) > 0 > self._score(ends[1], z)
            else end
            for z, end in ((Z95, -1.0), (-Z95, 1.0))
        )
        return min(low, self.difference), max(high, self.difference)

    def _score(self, difference: float, z: float) -> float:
        """Return how far Tango's score of a difference is above ``z``; it falls with it."""
        n, b, c = self.num_images, self.only_first, self.only_second
        # The likeliest share of images that only the second has right, if this is the difference.
        linear = (2 * n - b + c) * difference - b - c
        root = linear**2 + 8 * n * c * difference * (1 - difference)
        share = max(0.0, (sqrt(max(0.0, root)) - linear) / (4 * n))
        variance = n * (2 * share + difference * (1 - difference))
        return (b - c - n * difference) / sqrt(max(variance, EDGE**2)) - z

    @property
    def p_value(self) -> float:
        """Return McNemar's exact test: the chance of so uneven a split between equals."""
        discordant = self.only_first + self.only_second
        if discordant == 0:
            return 1.0
        return float(binomtest(self.only_first, discordant).pvalue)

    @property
    def drop(self) -> Drop:
        """Return what the second lost, as records keep it."""
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
        """Count a batch: (N,) probability of the first class, (N,) whether it was right."""
        bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
        self.counts += np.bincount(bins, minlength=NUM_BINS)
        self.right += np.bincount(bins, weights=right, minlength=NUM_BINS).astype(np.int64)
        self.confidence += np.bincount(bins, weights=confidence, minlength=NUM_BINS)

    @property
    def expected_calibration_error(self) -> float:
        """Mean distance of confidence and accuracy over the images (ECE; Naeini et al. 2015)."""
        total = int(self.counts.sum())
        return float(np.abs(self.right - self.confidence).sum() / total) if total else 0.0
