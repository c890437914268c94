"""What a set's rows mean: which labels an answer lists, whether members agree, how sure it is.

Of a **classification** set a row is a distribution: the classes exclude each other, and an answer
lists the likeliest. Of a **multi-label** set it is a score for each class by itself, as a sigmoid
gives it: an answer lists the labels whose score is the threshold or more, which may be none.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from models.ensemble import Flags, Prediction, Probabilities, entropy, likeliest, top_k

DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True)
class AnswerRule:
    """How rows (C,) of one set are read.

    Args:
        labels: one per class, in the networks' order.
        threshold: of a multi-label set's scores, 0 to 1; None: a classification set.
        sure_from: the least probability of a sure answer's first class; None: not measured.

    """

    labels: Sequence[str]
    threshold: float | None = None
    sure_from: float | None = None

    @property
    def is_multi_label(self) -> bool:
        """Whether a row is a score for each class by itself."""
        return self.threshold is not None

    def asked(self, threshold: float | None) -> "AnswerRule":
        """Return the rule with the threshold that a request asks for; None: the set's."""
        return self if threshold is None else AnswerRule(self.labels, threshold)

    def predictions(self, row: Probabilities, k: int) -> list[Prediction]:
        """Return what an answer lists of a row (C,), at most ``k``, the highest first."""
        found = top_k(row, self.labels, k)
        if self.threshold is None:
            return found
        least = as_float32(self.threshold)
        return [one for one in found if one.probability >= least]

    def agree(self, rows: Iterable[Probabilities]) -> bool:
        """Whether rows (C,) say the same: the likeliest class, or all labels of a multi-label set.

        However many an answer lists.
        """
        if self.threshold is None:
            return len({likeliest(row) for row in rows}) == 1
        first, *others = [above(row, self.threshold) for row in rows]
        return all(bool((first == other).all()) for other in others)

    def is_sure(self, row: Probabilities) -> bool | None:
        """Whether the ensemble's row (C,) is sure: false if it is NaN; None where no rule is."""
        return None if self.sure_from is None else bool(row.max() >= np.float32(self.sure_from))

    def entropy(self, row: Probabilities) -> float:
        """Return how unsure a row (C,) is, from 0 (sure) to 1.

        Of a distribution Shannon's entropy as a share of the largest; of scores the mean over the
        classes of each one's binary entropy in bits.
        """
        return entropy(row) if self.threshold is None else binary_entropy(row)


def above(rows: Probabilities, threshold: float) -> Flags:
    """Return which scores of (..., C) are the threshold or more.

    Compared in float32, as scores are: 0.7 is not above a score of 0.7.
    """
    found: Flags = rows >= np.float32(threshold)
    return found


def as_float32(value: float) -> float:
    """Return the float32 nearest to a value."""
    return float(np.float32(value))


def binary_entropy(row: Probabilities) -> float:
    """Return the mean of the binary entropies, in bits, of scores (C,): 0 to 1."""
    total = math.fsum(
        p * math.log2(p) + (1 - p) * math.log2(1 - p) for p in row.tolist() if 0 < p < 1
    )
    return max(0.0, -total / len(row))
