"""Chooses the bound on the first class's probability from which an ensemble's answer is sure.

The bound is the lowest above which at least the requested share is right on half of the images, by
the lower end of the 95 % interval. A hash of each file decides its half. The other half gives the
reported share, so that it is unbiased.
"""

import threading

import numpy as np

from calibration.datasets import LabelledImage, truth_of
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.subsets.split import is_for_fitting
from models.accuracy import ENSEMBLE, SureRecord, wilson_interval
from models.errors import ModelSetError
from models.record import Precision

MIN_IMAGES = 100  # sure images in each half
NUM_STEPS = 1000  # a bound has three decimals


class SureFit:
    """Counts by the first class's probability, for each half: all images, and those that are right.

    Args:
        precision: of the networks.
        target: the required share of right answers among sure ones, 0 to 1.

    """

    def __init__(self, precision: Precision, target: float) -> None:
        self._precision: Precision = precision
        self._target = target
        self._edges = np.arange(NUM_STEPS, dtype=np.float32) / np.float32(NUM_STEPS)
        self._counts = np.zeros((2, 2, NUM_STEPS), np.int64)  # [fitted to, right, step]
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
            probability=step / NUM_STEPS,
            target=self._target,
            num_images=num_images,
            share=round(num_judged / num_images, 4),
            right=round(int(right[0, step]) / num_judged, 4),
            right_interval=(round(low, 4), round(high, 4)),
        )
