"""What the answers of a request come to in the metrics."""

from app.metrics.answers import record_answers, stage_tags
from app.metrics.table import ANSWERS, ENTROPY, SKIPPED, STAGE_MS
from tests.support.answers import answer_of
from tests.support.instruments import Instruments


def test_durations_are_observed_by_stage_and_member(told: Instruments) -> None:
    durations = [(stage_tags("read", None), 2.0), (stage_tags("infer", "a"), 3.0)]
    record_answers([answer_of()], 0.1, durations)
    assert told.observed(STAGE_MS) == {("read", "none"): 1, ("infer", "a"): 1}


def test_agreement_and_degraded_answers(told: Instruments) -> None:
    answers = [
        answer_of(),
        answer_of(),
        answer_of(agreement=False),
        answer_of("a", degraded=True),
    ]
    record_answers(answers, 0.0, [])
    assert told.of(ANSWERS) == {("yes", "no"): 2, ("no", "no"): 1, ("alone", "yes"): 1}


def test_skipped_members(told: Instruments) -> None:
    record_answers([answer_of("a", skipped="bc"), answer_of("a", skipped="b")], 0.0, [])
    assert told.of(SKIPPED) == {("b",): 2, ("c",): 1}
    assert told.of(ANSWERS) == {("alone", "no"): 2}


def test_entropy_is_summed(told: Instruments) -> None:
    record_answers([answer_of(), answer_of()], 0.75, [])
    assert told.of(ENTROPY) == {(): 0.75}
