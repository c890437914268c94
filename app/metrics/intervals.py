"""Confidence intervals of 95 %, without NumPy, for commands that have to start fast."""

import math

Z95 = 1.959963984540054  # quantile of the normal distribution, two-sided
Interval = tuple[float, float]


def wilson(part: int, number: int) -> tuple[float, Interval]:
    """Return the share ``part / number`` and its Wilson interval; ``number`` must not be 0."""
    share, spread = part / number, Z95**2 / number
    center = (share + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * math.sqrt(share * (1 - share) / number + spread / 4 / number)
    return share, (max(0.0, center - half), min(1.0, center + half))
