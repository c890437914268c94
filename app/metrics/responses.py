"""Metrics of answers: latency by stage, agreement and entropy."""

from collections.abc import Iterator, Sequence
from functools import cache

from app.metrics.meter import Tags, meter
from app.metrics.table import ANSWERS, ENTROPY, SKIPPED, STAGE_MS
from app.responses import Classified, StageTiming

# The same span in the answer of every image.
OF_REQUEST = frozenset({"read", "cache", "preprocess", "combine"})


def record_answers(
    answers: Sequence[Classified], entropies: Sequence[float], *, is_rest: bool = False
) -> None:
    """Record the images of one request; ``entropies`` are 0..1, in any order.

    ``is_rest``: others of the same request are recorded by themselves.
    """
    meter.defer(_record_answers, answers, entropies, is_rest)


def _record_answers(
    answers: Sequence[Classified], entropies: Sequence[float], is_rest: bool
) -> None:
    stages = stages_of(answers, is_rest=is_rest)
    meter.observe_all(
        STAGE_MS, [(_tags(stage.stage, stage.member), stage.duration_ms) for stage in stages]
    )
    for answer in answers:
        meter.count(ANSWERS, agreed=_agreed(answer), degraded="yes" if answer.degraded else "no")
        for member in answer.skipped_members or ():
            meter.count(SKIPPED, member=member)
    meter.count(ENTROPY, by=sum(entropies))


def observe_stage(stage: str, duration_ms: float, member: str | None = None) -> None:
    """Record how long a stage took for a request or an image."""
    meter.observe_all(STAGE_MS, [(_tags(stage, member), duration_ms)])


@cache
def _tags(stage: str, member: str | None) -> Tags:
    return (("stage", stage), ("member", member or "none"))


def defer_stage(stage: str, duration_ms: float) -> None:
    """Record a stage of a request later."""
    meter.defer(observe_stage, stage, duration_ms)


def stages_of(answers: Sequence[Classified], *, is_rest: bool = False) -> Iterator[StageTiming]:
    """Return every stage that ran for a request once, though each answer tells its request's."""
    for number, answer in enumerate(answers, start=int(is_rest)):
        for stage in answer.timings_ms.stages:
            if number == 0 or stage.stage not in OF_REQUEST:
                yield stage


def _agreed(answer: Classified) -> str:
    if len(answer.members) == 1:
        return "alone"
    return "yes" if answer.agreement else "no"
