"""The combiner's arithmetic: weighted average, top-k, entropy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Probabilities = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
TINY = np.finfo(np.float32).tiny
FEW_CLASSES = 64  # below, sorting all of them costs no more than finding the best


@dataclass(slots=True)
class Prediction:
    """One class and its probability, 0..1."""

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
    mean: Probabilities | None = None  # (N, C)
    for name, rows in members.items():
        share = rows * np.float32(weights[name] / total)
        mean = share if mean is None else np.add(mean, share, out=mean)
    assert mean is not None
    return mean


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
    """Return :func:`entropies` of one row (C,)."""
    return entropies(row[None])[0]


def entropies(rows: Probabilities) -> list[float]:
    """Return how unsure each of (N, C) is: Shannon's entropy as a share of the largest, ln C.

    0: one class has all; 1: all classes are alike. So sets of any size have the same scale.
    """
    num_classes = rows.shape[1]
    if num_classes < 2:
        return [0.0] * len(rows)
    logs = np.log(np.maximum(rows, TINY))  # 0 ln 0 is 0
    shares = np.einsum("nc,nc->n", rows, logs) / -math.log(num_classes)  # (N,)
    found: list[float] = (np.maximum(shares, 0.0) + 0.0).tolist()  # + 0.0: no -0.0
    return found


def top_k(row: Probabilities, labels: Sequence[str], k: int) -> list[Prediction]:
    """Return :func:`rank` of one row (C,)."""
    return rank(row[None], labels, k)[0]


def rank(rows: Probabilities, labels: Sequence[str], k: int) -> list[list[Prediction]]:
    """Return the ``k`` likeliest classes of each of (N, C), likeliest first; ties by lower index.

    NaN counts as least likely.
    """
    order = _order(rows, k)  # (N, k)
    best = rows[np.arange(len(rows))[:, None], order]
    return [
        [Prediction(i, labels[i], p) for i, p in zip(indices, probabilities, strict=True)]
        for indices, probabilities in zip(order.tolist(), best.tolist(), strict=True)
    ]


def _order(rows: Probabilities, k: int) -> npt.NDArray[np.intp]:
    """Return the indices of the ``k`` largest of each row, sorted: (N, C) to (N, min(k, C)).

    Where many classes are left out, sorting only those that can be among the ``k`` costs a third.
    """
    if rows.shape[1] < FEW_CLASSES or 4 * k > rows.shape[1]:
        order: npt.NDArray[np.intp] = np.argsort(-rows, axis=1, kind="stable")[:, :k]
        return order
    least = np.partition(rows, -k, axis=1)[:, -k]  # (N,) the k-th largest
    found = np.empty((len(rows), k), np.intp)
    for row, bound, place in zip(rows, least, found, strict=True):
        candidates = np.flatnonzero(~(row < bound))  # by index; more than k if some tie, all if NaN
        place[:] = candidates[np.argsort(-row[candidates], kind="stable")[:k]]
    return found
