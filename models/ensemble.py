"""The arithmetic of the ensemble: weighted average, top-k and entropy, and the rule for an answer.

In a **classification** set a row is a distribution over exclusive classes, and an answer lists the
likeliest. In a **multi-label** set a row has an independent score for each class, as from a
sigmoid. An answer lists the labels with a score of at least the threshold, perhaps none.
:class:`AnswerRule` makes labels of a row, by the set's task.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Probabilities = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
LEAST = np.float32(1e-37)  # bounds a probability before its logarithm
DEFAULT_THRESHOLD = 0.5
FEW_CLASSES = 64  # up to this number Python is as fast as NumPy


@dataclass(slots=True)
class Prediction:
    """One class and its probability, 0..1; of a multi-label set, its score."""

    index: int
    label: str
    probability: float


def tempered(rows: Probabilities, temperature: float) -> Probabilities:
    """Return float32 (N, C) with the logits divided by ``temperature`` (Guo et al., 2017)."""
    if temperature == 1:
        return rows
    # NumPy's power would take 1.5 times as long.
    scaled: Probabilities = np.log(np.maximum(rows, LEAST))
    scaled *= np.float32(1 / temperature)
    np.exp(scaled, out=scaled)
    scaled /= scaled.sum(axis=1, keepdims=True)
    return scaled


def average(
    members: Mapping[str, Probabilities], weights: Mapping[str, float], temperature: float = 1.0
) -> Probabilities:
    """Return the weighted mean of the members' probabilities, each float32 (N, C).

    The weights of the members that answered are scaled to sum to one, so the mean stays a
    distribution if a member is missing. ``temperature`` is that of this average
    (:class:`models.plan.Trust`).
    """
    if not members:
        raise ValueError("no member answered: there is nothing to average")
    total = sum([weights[name] for name in members])
    mean: Probabilities | None = None  # (N, C)
    for name, rows in members.items():
        share = rows * np.float32(weights[name] / total)
        mean = share if mean is None else np.add(mean, share, out=mean)
    assert mean is not None
    return tempered(mean, temperature)


def reaches(row: Probabilities, bound: float | None) -> bool | None:
    """Whether the first class of a row (C,) reaches a bound; False if NaN, None without one."""
    return None if bound is None else bool(row.max() >= np.float32(bound))


def entropy(row: Probabilities) -> float:
    """Return the uncertainty of a row (C,): Shannon's entropy as a share of the largest, ln C.

    0: a single class has all; 1: all classes are equal. So sets of any size share the scale.
    """
    if len(row) < 2:
        return 0.0
    if len(row) <= FEW_CLASSES:
        total = math.fsum([p * math.log(p) for p in row.tolist() if p > 0])  # 0 ln 0 is 0
    else:
        some = row[row > 0]
        total = float(np.sum(some * np.log(some)))
    return max(0.0, -total / math.log(len(row)))


def top_k(row: Probabilities, labels: Sequence[str], k: int) -> list[Prediction]:
    """Return the ``k`` likeliest classes of a row (C,), likeliest first; ties by lower index."""
    values = row.tolist()
    return [Prediction(i, labels[i], values[i]) for i in _largest(row, values, k)]


def likeliest(row: Probabilities) -> int:
    """Return the index of the likeliest class of a row (C,), the first among ties.

    ``argmax`` releases the GIL, as sorting does; for few values, comparing in Python is faster.
    """
    if len(row) > FEW_CLASSES:
        return int(row.argmax())
    values: list[float] = row.tolist()
    return values.index(max(values))


def _largest(row: Probabilities, values: Sequence[float], k: int) -> Sequence[int]:
    """Return the indices of the ``k`` largest values, in order; ``values`` are the row's.

    NumPy's sorts release the GIL. Getting it back from a decoding thread may cost more than the
    sort, so a few classes are sorted in Python. Of many classes, only candidates for the ``k`` are
    sorted.
    """
    if len(values) <= FEW_CLASSES:
        # A stable sort, so that ties stay in the order of their indices.
        return sorted(range(len(values)), key=values.__getitem__, reverse=True)[:k]
    if 4 * k > len(values):
        whole: list[int] = np.argsort(-row, kind="stable")[:k].tolist()
        return whole
    bound = np.partition(row, -k)[-k]
    candidates = np.flatnonzero(~(row < bound))  # more than k with ties, all with NaN
    best: list[int] = candidates[np.argsort(-row[candidates], kind="stable")[:k]].tolist()
    return best


@dataclass(frozen=True)
class AnswerRule:
    """Interprets the rows (C,) of a set."""

    labels: Sequence[str]  # one per class, in the networks' order
    threshold: float | None = None  # for a multi-label set's scores; None: a classification set

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

    def answer_set(self, row: Probabilities, set_from: float) -> list[Prediction]:
        """Return the answer set of a row (C,), likeliest first: the first class is always in it."""
        num = max(1, int((row >= np.float32(set_from)).sum()))
        return top_k(row, self.labels, num)

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
