"""Counts a classifier's right and wrong answers; memory grows with classes, not with images."""

from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.statistics import Reliability, Rightness
from models.accuracy import Score, wilson_interval
from models.ensemble import Probabilities

Indices = npt.NDArray[np.int64]


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
