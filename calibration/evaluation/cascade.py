"""Estimates a cascade's accuracy and CPU time, for each threshold.

The first member answers alone if its margin is at least the threshold (``app.graph.cascade``).
Images are counted in bins of the margin, so memory does not grow with their number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calibration.statistics import Paired, Rightness
from models.accuracy import wilson_interval
from models.ensemble import Probabilities, margins

NUM_BINS = 1000  # a threshold is a bin's lower edge: three decimals
EDGES = np.arange(NUM_BINS, dtype=np.float32) / np.float32(NUM_BINS)
STEPS = range(NUM_BINS // 10, NUM_BINS, NUM_BINS // 10)
SUGGESTED_WITHIN = 0.005  # of the ensemble's top-1, a fraction


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
        self._counts = np.zeros((2, 2, NUM_BINS), np.int64)  # [first right, ensemble right, bin]

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
        return [self._at(index, cpu_ms) for index in (NUM_BINS, *chosen)]

    def _at(self, index: int, cpu_ms: Mapping[str, float]) -> CascadePoint:
        """Return the point whose threshold is the lower edge of bin ``index``."""
        num_images = int(self._counts.sum())
        skipped, asked = self._counts[:, :, index:], self._counts[:, :, :index]
        num_right = int(skipped[1].sum() + asked[:, 1].sum())
        share = int(skipped.sum()) / num_images
        others = sum(cpu_ms[name] for name in self.others)
        return CascadePoint(
            None if index == NUM_BINS else index / NUM_BINS,
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
