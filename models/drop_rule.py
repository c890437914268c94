"""Decides whether INT8 lost more than a set allows: refused, verified, or unknown.

Chance moves every measured loss, so one figure over ``max_drop`` proves nothing on few images, nor
does one under it. **Refused** needs a loss over ``max_drop`` that is no chance; **verified** needs
an interval that ends below a bound, which is tighter the more images there are; all else is
**unknown**. DECISIONS.md, "The accuracy gate"; ``tests/load/gate_simulation.py`` measures how
often either is wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Literal

from models.accuracy import Z95, Drop, Loss, MultiLabelDrop

DropOutcome = Literal["refused", "verified", "unknown"]
SIGNIFICANCE = 0.05  # the chance that any figure of a set as good as float is refused
# An interval verifies if it ends this much over max_drop, a fraction: half a point at 1,000 images,
# as intervals shrink with the root of their number; never so much that two points would pass.
SLACK, SLACK_IMAGES, MAX_SLACK = 0.005, 1000, 0.015
LEAST_IMAGES = 254  # the fewest that can verify, without any difference, with the usual max_drop
MOST_IMAGES = 10**7  # more are not asked for


@dataclass(frozen=True)
class Judgement:
    """What one figure of a classifier says, with the number of images that it was measured on."""

    name: str  # of a member, or ensemble
    loss: Loss
    num_images: int
    outcome: DropOutcome
    bound: float  # that the interval must end under, to verify
    num_more: int | None  # about so many images more would tell; None: no number that there is


def bound(max_drop: float, num_images: int) -> float:
    """Return where the interval of a loss must end, at most, for INT8 to be verified."""
    return max_drop + min(MAX_SLACK, SLACK * sqrt(SLACK_IMAGES / num_images))


def judged(
    drops: Mapping[str, Drop | MultiLabelDrop],
    num_images: int,
    max_drop: float,
    num_figures: int = 0,
) -> list[Judgement]:
    """Judge every figure of an evaluation, or some of the ``num_figures`` that it has.

    A loss is no chance if its p-value times the number of figures is within ``SIGNIFICANCE``
    (Bonferroni): with more members it is no likelier that one is refused by chance.
    """
    losses = [(name, loss) for name, drop in drops.items() for loss in drop.losses]
    level = SIGNIFICANCE / max(1, num_figures, len(losses))
    return [_judged(name, loss, num_images, max_drop, level) for name, loss in losses]


def outcome_of(judgements: list[Judgement]) -> DropOutcome:
    """Return what they say together: one refuses, all verify."""
    outcomes = {judgement.outcome for judgement in judgements}
    if "refused" in outcomes:
        return "refused"
    return "verified" if outcomes == {"verified"} else "unknown"


def _judged(name: str, loss: Loss, num_images: int, max_drop: float, level: float) -> Judgement:
    limit = bound(max_drop, num_images)
    # What N images can tell at all, should all of them, or none, have changed (a bootstrap has then
    # no spread): the exact test of N images on one side, the score interval of none.
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
    """Estimate how many images more would tell, if loss and differences went on alike.

    Half a score interval is about z sqrt(v / n + z^2 / n^2), where v is the variance of one image's
    difference: solved for v here, then tried with more images, five per cent at a time.
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
    """Return the next number with at most two digits before its zeros."""
    step = 1
    while number / step > 100:
        step *= 10
    return int(-(-number // step)) * step
