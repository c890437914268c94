"""The accuracy and cost of ensembles, and the Pareto front of both."""

from collections.abc import Sequence
from dataclasses import dataclass

from calibration.evaluation.subsets.candidates import Method
from calibration.evaluation.subsets.costs import MemberCost
from calibration.statistics import Paired
from models.record import Precision

SIGNIFICANCE = 0.05  # of McNemar's test against the best
PREFERENCE: tuple[Method, ...] = ("average", "logistic")  # among equals


@dataclass(frozen=True)
class SubsetScore:
    """An ensemble's results on the judging images, or the cascade's at a threshold."""

    members: tuple[str, ...]
    weights: dict[str, float]
    method: Method
    margin: float | None  # for a cascade
    top1: float
    top1_interval: tuple[float, float]  # 95 %, Wilson
    nats: float | None  # mean log-likelihood of the true class; None for a cascade
    lost: Paired  # the set as served against this one
    behind: Paired  # the best ensemble against this one
    cpu_ms: float  # per image, in the networks only
    memory_mb: float  # of the networks

    @property
    def is_as_good_as_the_best(self) -> bool:
        """Whether it is not significantly worse than the best (McNemar's test; Dietterich 1998)."""
        return self.behind.difference <= 0 or self.behind.p_value > SIGNIFICANCE

    @property
    def name(self) -> str:
        """Its name in tables and plots."""
        members = " + ".join(self.members)
        if self.margin is not None:
            return f"{members}, cascade at {self.margin:g}"
        return members if len(self.members) == 1 else f"{members}, {self.method}"


@dataclass(frozen=True)
class SubsetsResult:
    """Every ensemble of a set's members that was compared."""

    precision: Precision
    num_fitted: int  # images for fitting weights
    num_judged: int  # other images, for all figures
    manifest_weights: dict[str, float]
    costs: dict[str, MemberCost]
    scores: list[SubsetScore]  # with the cascade's thresholds, the cheapest first
    served_as: str  # the set's name in the service's settings


def pareto_front(scores: Sequence[SubsetScore]) -> list[SubsetScore]:
    """Return the scores that no other score beats, the cheapest first.

    A score beats another if it is no worse in top-1, CPU time and memory, and better in at least
    one of them. Among equals only the first by cost and simplicity is kept.
    """
    front: list[SubsetScore] = []
    for score in sorted(scores, key=by_cost):
        if not any(_is_as_good(other, score) for other in front):
            front.append(score)
    return front


def cheapest_as_good(scores: Sequence[SubsetScore]) -> SubsetScore:
    """Return the cheapest score that is not significantly worse than the best."""
    return min((score for score in scores if score.is_as_good_as_the_best), key=by_cost)


def by_cost(score: SubsetScore) -> tuple[float, float, float, int, int]:
    """Sort by cost, then accuracy, memory and simplicity."""
    of_method = PREFERENCE.index(score.method)
    is_cascade = score.margin is not None
    return score.cpu_ms, -score.top1, score.memory_mb, is_cascade, of_method


def _is_as_good(first: SubsetScore, second: SubsetScore) -> bool:
    return (
        first.top1 >= second.top1
        and first.cpu_ms <= second.cpu_ms
        and first.memory_mb <= second.memory_mb
    )
