"""Turns a set's probabilities into labels, the members' agreement, and whether an answer is sure.

In a **classification** set a row is a distribution over exclusive classes, and an answer lists the
likeliest. In a **multi-label** set a row has an independent score for each class, as from a
sigmoid. An answer lists the labels with a score of at least the threshold, perhaps none.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from models.ensemble import Flags, Prediction, Probabilities, entropy, likeliest, top_k

DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True)
class AnswerRule:
    """Interprets the rows (C,) of a set."""

    labels: Sequence[str]  # one per class, in the networks' order
    threshold: float | None = None  # for a multi-label set's scores; None: a classification set
    sure_from: float | None = None  # the lowest probability of a sure answer's first class

    @property
    def is_multi_label(self) -> bool:
        """Whether a row has an independent score for each class."""
        return self.threshold is not None

    def asked(self, threshold: float | None) -> "AnswerRule":
        """Return the rule with a request's threshold; None keeps the set's."""
        return self if threshold is None else AnswerRule(self.labels, threshold)

    def predictions(self, row: Probabilities, k: int) -> list[Prediction]:
        """Return the classes listed for a row (C,), at most ``k``, the highest first."""
        ranked = top_k(row, self.labels, k)
        if self.threshold is None:
            return ranked
        least = float(np.float32(self.threshold))
        return [prediction for prediction in ranked if prediction.probability >= least]

    def agree(self, rows: Iterable[Probabilities]) -> bool:
        """Whether rows (C,) agree: on the likeliest class, or on all labels of a multi-label set.

        The number of labels that an answer lists does not matter.
        """
        if self.threshold is None:
            return len(set(map(likeliest, rows))) == 1
        first, *others = [above(row, self.threshold) for row in rows]
        return all(bool((first == other).all()) for other in others)

    def is_sure(self, row: Probabilities) -> bool | None:
        """Whether the ensemble's row (C,) is sure; False if it is NaN, None without a bound."""
        return None if self.sure_from is None else bool(row.max() >= np.float32(self.sure_from))

    def entropy(self, row: Probabilities) -> float:
        """Return the uncertainty of a row (C,), from 0 (sure) to 1.

        For a distribution it is Shannon's entropy as a share of the largest possible. For scores it
        is the mean binary entropy of the classes, in bits.
        """
        if self.threshold is None:
            return entropy(row)
        inner = (p for p in row.tolist() if 0 < p < 1)
        total = math.fsum(p * math.log2(p) + (1 - p) * math.log2(1 - p) for p in inner)
        return max(0.0, -total / len(row))


def above(rows: Probabilities, threshold: float) -> Flags:
    """Return which scores of (..., C) are at least the threshold.

    The comparison is in float32, like the scores: otherwise a score of 0.7 would be below 0.7.
    """
    flags: Flags = rows >= np.float32(threshold)
    return flags
