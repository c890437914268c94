"""Decides whether INT8 lost more than a set allows: refused, verified, or unknown.

Every measured loss varies by chance, so with few images a figure above or below ``max_drop`` proves
nothing. **Refused** requires a significant loss above ``max_drop``. **Verified** requires an
interval that ends below a bound, which is tighter with more images. Everything else is **unknown**.
See decision 0011; ``tests/load/gate_simulation.py`` measures the rates of both errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Literal

from models.accuracy import Z95, Drop, Loss, MultiLabelDrop

DropOutcome = Literal["refused", "verified", "unknown"]
SIGNIFICANCE = 0.05  # the probability that a set as good as float is refused for any of its figures
# An interval verifies if it ends less than this above max_drop, as a fraction: half a point at
# 1,000 images, since intervals shrink with the root of their number. MAX_SLACK keeps losses of two
# points from being verified.
SLACK, SLACK_IMAGES, MAX_SLACK = 0.005, 1000, 0.015
LEAST_IMAGES = 254  # fewer cannot verify with the usual max_drop, even without any difference
MOST_IMAGES = 10**7  # more are not requested


@dataclass(frozen=True)
class Judgement:
    """The judgement on a figure of a classifier, and its number of images."""

    name: str  # a member's, or ensemble
    loss: Loss
    num_images: int
    outcome: DropOutcome
    bound: float  # the interval must end below this to verify
    num_more: int | None  # roughly how many more images would decide; None: no number would


def bound(max_drop: float, num_images: int) -> float:
    """Return the highest upper end of a loss's interval that still verifies INT8."""
    return max_drop + min(MAX_SLACK, SLACK * sqrt(SLACK_IMAGES / num_images))


def judged(
    drops: Mapping[str, Drop | MultiLabelDrop],
    num_images: int,
    max_drop: float,
    num_figures: int = 0,
) -> list[Judgement]:
    """Judge the figures of an evaluation; ``drops`` are by member name or ``ensemble``.

    A loss is significant if its p-value times the number of figures is within ``SIGNIFICANCE``
    (Bonferroni). So sets with more members are not refused more often by chance. ``num_figures`` is
    the number of all figures, if ``drops`` has only some of them.
    """
    losses = [(name, loss) for name, drop in drops.items() for loss in drop.losses]
    level = SIGNIFICANCE / max(1, num_figures, len(losses))
    return [_judged(name, loss, num_images, max_drop, level) for name, loss in losses]


def outcome_of(judgements: list[Judgement]) -> DropOutcome:
    """Return the common outcome: any refusal refuses, verification needs all."""
    outcomes = {judgement.outcome for judgement in judgements}
    if "refused" in outcomes:
        return "refused"
    return "verified" if outcomes == {"verified"} else "unknown"


def _judged(name: str, loss: Loss, num_images: int, max_drop: float, level: float) -> Judgement:
    limit = bound(max_drop, num_images)
    # A bound for N images, even if all of them, or none, changed (then a bootstrap has no spread):
    # the one-sided exact test of N images, and the score interval of no change.
    p_value = max(loss.p_value, 2.0 ** (1 - num_images))
    high = max(loss.high, loss.lost + Z95**2 / (num_images + Z95**2))
    outcome: DropOutcome = "unknown"
    if loss.lost > max_drop and p_value <= level:
        outcome = "refused"
    elif loss.lost <= max_drop and high <= limit:
        outcome = "verified"
    more = _num_more(loss, num_images, max_drop, level) if outcome == "unknown" else None
    return Judgement(name, loss, num_images, outcome, limit, more)


def _num_more(loss: Loss, num_images: int, max_drop: float, level: float) -> int | None:
    """Estimate how many more images would decide, if loss and differences stayed alike.

    Half a score interval is about z sqrt(v / n + z^2 / n^2), with v the variance of an image's
    difference. This is solved for v, and then evaluated for more images in steps of 5 %.
    """
    half = loss.high - loss.lost
    variance = max(0.0, half**2 * num_images / Z95**2 - Z95**2 / num_images)
    z_refused, total = -NormalDist().inv_cdf(level / 2), float(num_images)
    while (total := total * 1.05) < MOST_IMAGES:
        if loss.lost > max_drop:
            is_certain = loss.lost >= z_refused * sqrt(variance / total) and (
                2.0 ** (1 - total * loss.lost) <= level  # if INT8 is right nowhere else
            )
        else:
            high = loss.lost + Z95 * sqrt(variance / total + (Z95 / total) ** 2)
            is_certain = high <= bound(max_drop, round(total))
        if is_certain:
            return rounded_up(total - num_images)
    return None


def rounded_up(number: float) -> int:
    """Return the next higher number with at most two digits before its zeros."""
    step = 1
    while number / step > 100:
        step *= 10
    return int(-(-number // step)) * step
