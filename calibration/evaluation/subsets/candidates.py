"""The ensembles that are compared: subsets of the members, and how their rows are combined."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
import numpy.typing as npt

from calibration.evaluation.fit_weights import fit_mixture
from calibration.evaluation.subsets.logistic import fit_logistic
from models.errors import ModelSetError

# plain: equal weights. served: the manifest's. interpolated: fitted weights of the probabilities.
# logistic: fitted weights of the logarithms. Of equals the earlier is preferred.
Method = Literal["plain", "served", "interpolated", "logistic"]
MAX_MEMBERS = 8  # 255 subsets
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Candidate:
    """An ensemble of some of a set's members."""

    weights: dict[str, float]  # of each member, in the manifest's order; the logarithms', or linear
    method: Method

    @property
    def members(self) -> tuple[str, ...]:
        """The members' names, in the manifest's order."""
        return tuple(self.weights)


@dataclass(frozen=True)
class FitData:
    """What the members said of the images that weights are fitted to.

    ``rows`` may be of fewer images than ``of_truth``: the first ones, as many as there is memory
    for.
    """

    of_truth: Matrix  # (N, M), each member's probability of each image's true class
    rows: npt.NDArray[np.float32]  # (M, K, C), K <= N
    truth: npt.NDArray[np.int64]  # (K,)


def subsets_of(members: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all 2**M - 1 subsets, the smallest first, each in the members' order.

    Raises:
        ModelSetError: there are none to compare, or too many.

    """
    if not 1 < len(members) <= MAX_MEMBERS:
        raise ModelSetError(
            f"--subsets compares ensembles of 2 to {MAX_MEMBERS} members; this set has "
            f"{len(members)} ({', '.join(members)}): leave it out, or take some members away"
        )
    sizes = range(1, len(members) + 1)
    return [chosen for size in sizes for chosen in combinations(members, size)]


def candidates_of(members: Mapping[str, float], data: FitData) -> list[Candidate]:
    """Return every candidate, the weights of the fitted ones fitted to ``data``.

    ``members`` are the manifest's weights, by name, in its order, which is that of ``data``.
    """
    names = list(members)
    found = []
    for chosen in subsets_of(names):
        found.append(Candidate(dict.fromkeys(chosen, 1 / len(chosen)), "plain"))
        if len(chosen) == len(names) and len(set(members.values())) > 1:
            total = sum(members.values())
            served = {name: weight / total for name, weight in members.items()}
            found.append(Candidate(served, "served"))
        if len(chosen) > 1:
            found += _fitted(chosen, [names.index(name) for name in chosen], data)
    return found


def _fitted(chosen: Sequence[str], columns: list[int], data: FitData) -> list[Candidate]:
    fits: dict[Method, Matrix] = {
        "interpolated": fit_mixture(data.of_truth[:, columns]),
        "logistic": fit_logistic(data.rows[columns], data.truth),
    }
    return [
        Candidate(dict(zip(chosen, map(float, weights), strict=True)), method)
        for method, weights in fits.items()
    ]
