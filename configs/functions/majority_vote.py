"""A ``combine`` of one's own: the members vote, each with its likeliest class.

``configs/majority-vote.yaml`` serves with it.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]


def majority_vote(members: Mapping[str, Rows], weights: Mapping[str, float]) -> Rows:
    """Return each class's share of the votes, a tie being decided by the members' probabilities.

    Args:
        members: float32 (N, C) probabilities, by member.
        weights: what each member's vote counts; they sum to one.

    Returns:
        float32 (N, C) of rows that sum to one.
    """
    some = next(iter(members.values()))
    votes = np.zeros(some.shape, np.float32)  # (N, C)
    average = np.zeros_like(votes)
    images = np.arange(len(some))
    for name, rows in members.items():
        votes[images, rows.argmax(axis=1)] += np.float32(weights[name])
        average += rows * np.float32(weights[name])
    # A hundredth of the average: less than any vote counts, unless there are a hundred.
    return (votes * np.float32(0.99) + average * np.float32(0.01)).astype(np.float32)
