"""The Pareto front and the choice, against a comparison of all with all."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.evaluation.subsets.scores import (
    PREFERENCE,
    SubsetScore,
    cheapest_as_good,
    pareto_front,
)
from calibration.statistics import Paired

BOUNDED = settings(max_examples=200, deadline=None, database=None)
FEW = st.integers(0, 3)
BEHIND = [
    (0, 0),
    (1, 0),
    (5, 0),
    (6, 0),
    (40, 30),
    (40, 10),
]  # whom the best, and it, alone has right


@st.composite
def scored(draw) -> SubsetScore:
    return SubsetScore(
        members=("a",),
        weights={"a": 1.0},
        method=draw(st.sampled_from(PREFERENCE)),
        margin=draw(st.sampled_from([None, 0.5])),
        top1=draw(FEW) / 4,
        top1_interval=(0.0, 1.0),
        nats=None,
        lost=Paired(),
        behind=Paired(400, *draw(st.sampled_from(BEHIND))),
        cpu_ms=float(draw(FEW)),
        memory_mb=float(draw(FEW)),
    )


def cost(score: SubsetScore) -> tuple[float, float, float]:
    return -score.top1, score.cpu_ms, score.memory_mb


@BOUNDED
@given(scores=st.lists(scored(), min_size=1, max_size=12))
def test_the_front_is_what_nobody_beats(scores):
    def is_beaten(score: SubsetScore) -> bool:
        return any(
            cost(other) != cost(score)
            and all(a <= b for a, b in zip(cost(other), cost(score), strict=True))
            for other in scores
        )

    front = pareto_front(scores)
    assert {cost(s) for s in front} == {cost(s) for s in scores if not is_beaten(s)}
    assert len({cost(s) for s in front}) == len(front)  # one of equals
    assert [s.cpu_ms for s in front] == sorted(s.cpu_ms for s in front)


@BOUNDED
@given(scores=st.lists(scored(), min_size=1, max_size=12))
def test_the_choice_is_the_cheapest_that_chance_may_have_put_behind(scores):
    best = replace(scores[0], behind=Paired(400))
    chosen = cheapest_as_good([best, *scores])
    alike = [s for s in scores if (s.behind.only_first, s.behind.only_second) in BEHIND[:3]]
    alike += [s for s in scores if (s.behind.only_first, s.behind.only_second) == (40, 30)]
    assert chosen.cpu_ms == min(score.cpu_ms for score in [best, *alike])
