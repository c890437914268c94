"""Statistics of a measured accuracy: intervals, paired tests, calibration error.

Everything works on counts, so an evaluation needs no memory per image.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import binomtest

Rightness = npt.NDArray[np.bool_]  # (N,), whether each image's likeliest class is right
Z95 = 1.959964  # the normal distribution's 97.5 % quantile
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
        """Return the 95 % interval of the difference (Agresti and Min 2005: add half to each)."""
        n = self.num_images + 2
        b, c = self.only_first + 0.5, self.only_second + 0.5
        center = (b - c) / n
        half = Z95 * sqrt(max(b + c - (b - c) ** 2 / n, 0.0)) / n
        return max(-1.0, center - half), min(1.0, center + half)

    @property
    def p_value(self) -> float:
        """Return McNemar's exact test: the chance of so uneven a split between equals."""
        discordant = self.only_first + self.only_second
        if discordant == 0:
            return 1.0
        return float(binomtest(self.only_first, discordant).pvalue)


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
