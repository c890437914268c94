"""Metrics of answers: latency by stage, agreement and entropy."""

from collections.abc import Sequence
from functools import cache

from app.metrics.meter import Tags, meter
from app.metrics.table import ANSWERS, ENTROPY, SKIPPED, STAGE_MS
from app.responses import Classified

StageDuration = tuple[Tags, float]  # ms


@cache
def stage_tags(stage: str, member: str | None) -> Tags:
    """Return the tags of a stage's durations."""
    return (("stage", stage), ("member", member or "none"))


def record_answers(
    answers: Sequence[Classified], entropy: float, durations: list[StageDuration]
) -> None:
    """Record the images of one request: ``entropy`` is the sum of theirs, 0..1 each."""
    observe_stages(durations)
    for answer in answers:
        meter.count(ANSWERS, agreed=_agreed(answer), degraded="yes" if answer.degraded else "no")
        for member in answer.skipped_members or ():
            meter.count(SKIPPED, member=member)
    meter.count(ENTROPY, by=entropy)


def observe_stages(durations: list[StageDuration]) -> None:
    """Record how long stages took for a request or an image."""
    meter.observe_all(STAGE_MS, durations)


def _agreed(answer: Classified) -> str:
    if len(answer.members) == 1:
        return "alone"
    return "yes" if answer.agreement else "no"
