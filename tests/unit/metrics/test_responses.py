"""What the answers of a request come to in the metrics."""

from app.metrics.responses import record_answers
from app.metrics.table import ANSWERS, ENTROPY, SKIPPED, STAGE_MS
from app.responses import Classified, MemberOpinion, Prediction, StageTiming, Timings
from tests.support.instruments import Instruments

STAGES = [("read", None), ("decode", None), ("queue", "a"), ("infer", "a"), ("combine", None)]


def answer(
    members: str = "ab", agreement: bool = True, degraded: bool = False, skipped: str = ""
) -> Classified:
    row = Prediction(index=0, label="x", probability=0.9)
    opinion = MemberOpinion(label="x", probability=0.9, predictions=[row])
    stages = [StageTiming(stage=s, member=m, start_ms=0, duration_ms=2) for s, m in STAGES]
    return Classified(
        model_set="fake",
        predictions=[row],
        members=dict.fromkeys(members, opinion),
        agreement=agreement,
        degraded=degraded,
        skipped_members=list(skipped) or None,
        request_id="1",
        timings_ms=Timings(total=10, stages=stages),
    )


def test_the_stages_of_an_image(told: Instruments) -> None:
    record_answers([answer()], [0.1])
    assert told.observed(STAGE_MS) == {(stage, member or "none"): 1 for stage, member in STAGES}


def test_what_a_request_does_once_is_observed_once(told: Instruments) -> None:
    record_answers([answer(), answer(), answer()], [0.1] * 3)
    times = {stage: number for (stage, _), number in told.observed(STAGE_MS).items()}
    assert times == {"read": 1, "combine": 1, "decode": 3, "queue": 3, "infer": 3}


def test_agreement_and_degraded_answers(told: Instruments) -> None:
    answers = [answer(), answer(), answer(agreement=False), answer("a", degraded=True)]
    record_answers(answers, [0.0] * 4)
    assert told.of(ANSWERS) == {("yes", "no"): 2, ("no", "no"): 1, ("alone", "yes"): 1}


def test_skipped_members(told: Instruments) -> None:
    record_answers([answer("a", skipped="bc"), answer("a", skipped="b")], [0.0, 0.0])
    assert told.of(SKIPPED) == {("b",): 2, ("c",): 1}
    assert told.of(ANSWERS) == {("alone", "no"): 2}


def test_entropy_is_summed(told: Instruments) -> None:
    record_answers([answer(), answer()], [0.25, 0.5])
    assert told.of(ENTROPY) == {(): 0.75}


def test_a_request_of_bad_files_only(told: Instruments) -> None:
    record_answers([], [])
    assert told.observed(STAGE_MS) == {}
    assert told.of(ANSWERS) == {}
