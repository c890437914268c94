"""The compared ensembles: subsets of the members, with a way to combine their rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
import numpy.typing as npt

from calibration.evaluation.subsets.logistic import fit_logistic
from models.errors import ModelSetError

# average: of probabilities, with the manifest's weights. logistic: of their logarithms, with fitted
# weights. Ties go to the first.
Method = Literal["average", "logistic"]
MAX_MEMBERS = 8  # 255 subsets


@dataclass(frozen=True)
class Candidate:
    """An ensemble of some of a set's members."""

    weights: dict[str, float]  # in the manifest's order; an average's sum to one
    method: Method


@dataclass(frozen=True)
class FitData:
    """The members' answers to the images for fitting weights."""

    rows: npt.NDArray[np.float32]  # (M, N, C)
    truth: npt.NDArray[np.int64]  # (N,)


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
    """Return every candidate, with the weights of logistic ones fitted to ``data``.

    ``members`` are the manifest's weights by name, in the manifest's order, as in ``data``.
    """
    names = list(members)
    candidates = []
    for chosen in subsets_of(names):
        total = sum(members[name] for name in chosen)
        shares = {name: members[name] / total for name in chosen}
        candidates.append(Candidate(shares, "average"))
        if len(chosen) > 1:
            columns = [names.index(name) for name in chosen]
            weights = fit_logistic(data.rows[columns], data.truth).tolist()
            candidates.append(Candidate(dict(zip(chosen, weights, strict=True)), "logistic"))
    return candidates
