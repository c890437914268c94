"""The combiner's arithmetic: weighted average, top-k, entropy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Probabilities = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One class of an answer; ``probability`` in 0..1."""

    index: int
    label: str
    probability: float


def average(members: Mapping[str, Probabilities], weights: Mapping[str, float]) -> Probabilities:
    """Return the weighted mean of the members' probabilities, each float32 (N, C).

    The weights of the members that answered are scaled to sum to one, so the rows still sum to one
    when a member is absent.
    """
    if not members:
        raise ValueError("no member answered: there is nothing to average")
    total = sum(weights[name] for name in members)
    shares = [np.float32(weights[name] / total) * rows for name, rows in members.items()]
    rows: Probabilities = np.sum(shares, axis=0, dtype=np.float32)  # (N, C)
    return rows


def margins(rows: Probabilities) -> Probabilities:
    """Return how far each row's best two probabilities are apart: (N, C), C >= 2, to (N,), 0..1."""
    best = np.partition(rows, -2, axis=1)[:, -2:]  # (N, 2) ascending
    apart: Probabilities = best[:, 1] - best[:, 0]
    return apart


def is_sure(rows: Probabilities, margin: float) -> Flags:
    """Return for each of (N, C) whether its margin is ``margin`` or more; never when it is NaN."""
    sure: Flags = margins(rows) >= np.float32(margin)
    return sure


def entropy(row: Probabilities) -> float:
    """Return how unsure one row (C,) is: Shannon's entropy as a share of the largest, ln C.

    0: one class has all; 1: all classes are alike. So sets of any size have the same scale.
    """
    if len(row) < 2:
        return 0.0
    some = row[row > 0]  # 0 ln 0 is 0
    return -float(np.sum(some * np.log(some))) / math.log(len(row))


def top_k(row: Probabilities, labels: Sequence[str], k: int) -> list[Prediction]:
    """Return the ``k`` likeliest classes of one row (C,), likeliest first; ties by lower index."""
    order = np.argsort(-row, kind="stable")[:k]
    return [Prediction(int(i), labels[i], float(row[i])) for i in order]
