"""A ``combine`` of one's own: the weighted geometric mean, a logarithmic opinion pool.

A member that gives a class next to nothing has a veto, which it has not in an average.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
FLOOR = np.float32(1e-7)  # of a probability: a veto, but no infinite one


def geometric_mean(members: Mapping[str, Rows], weights: Mapping[str, float]) -> Rows:
    """Return the normalised weighted geometric mean of float32 (N, C) rows, by member.

    The weights sum to one.
    """
    scores = sum(
        np.log(np.maximum(rows, FLOOR)) * np.float32(weights[name])
        for name, rows in members.items()
    )
    raised = np.exp(scores - np.max(scores, axis=1, keepdims=True))
    pooled: Rows = (raised / raised.sum(axis=1, keepdims=True)).astype(np.float32)
    return pooled
