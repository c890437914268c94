"""The request's clock: durations from elsewhere, placed within what the Gateway timed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.answers import MemberAnswer
from app.telemetry.metric_table import ANSWERS, ENTROPY, STAGE_MS
from app.telemetry.metrics import Interval, RequestObserver
from tests.support.answers import answer_of
from tests.support.fakes import arrived

BOUNDED = settings(max_examples=100, deadline=None, database=None)
MS = st.floats(0, 1e5)
STAGES = [("read", None), ("decode", None), ("queue", "a"), ("infer", "a"), ("combine", None)]


@BOUNDED
@given(start=MS, length=MS, duration=MS)
def test_a_duration_is_put_into_the_middle_of_its_span(start, length, duration):
    placed = Interval(start, start + length).centred(duration)
    assert placed >= start  # also when a clock elsewhere measured more than the whole call
    if duration <= length:
        before, after = placed - start, (start + length) - (placed + duration)
        assert before == pytest.approx(after, abs=1e-6)


@BOUNDED
@given(hop=st.tuples(MS, MS), queue=MS, infer=MS, decode=MS)
def test_no_stage_is_negative(hop, queue, infer, decode):
    observer = arrived()
    answer = MemberAnswer(np.zeros((1, 3), np.float32), (queue,), (infer,), (4,), "")
    span = Interval(hop[0], hop[0] + hop[1])
    decoded(observer, span)
    timings = observer.timings_of_image(0, decode, {"m": span}, {"m": answer})
    assert all(stage.start_ms >= 0 and stage.duration_ms >= 0 for stage in timings.stages)
    assert timings.total >= 0
    queued, ran = timings.stages[2:4]
    assert (queued.stage, queued.member, queued.batch_size) == ("queue", "m", None)
    assert (ran.stage, ran.member, ran.batch_size) == ("infer", "m", 4)
    assert ran.start_ms == pytest.approx(queued.start_ms + queued.duration_ms, abs=0.0021)


def test_each_image_has_its_own_durations():
    observer = RequestObserver()
    answer = MemberAnswer(np.zeros((2, 3), np.float32), (3.0, 4.0), (5.0, 6.0), (1, 2), "")
    span = Interval(0, 100)
    decoded(observer, span)
    second = observer.timings_of_image(1, 2.0, {"m": span}, {"m": answer})
    found = {s.stage: (s.duration_ms, s.batch_size) for s in second.stages}
    assert (found["decode"], found["queue"]) == ((2.0, None), (4.0, None))
    assert found["infer"] == (6.0, 2)


def test_a_stage_ends_when_it_is_said_to():
    observer = RequestObserver()
    start_ms = observer.elapsed_ms()
    span = observer.timed("combine", start_ms)
    assert 0 <= span.start_ms == start_ms <= span.end_ms <= observer.elapsed_ms()


def decoded(observer: RequestObserver, span: Interval) -> None:
    """Let the Decoder have worked in this time."""
    observer.timed("decode", span.start_ms).end_ms = span.end_ms


def one_answer(observer: RequestObserver, num_images: int = 1) -> None:
    """Let images of a request be answered by one member."""
    answer = MemberAnswer(
        np.zeros((num_images, 3), np.float32),
        (3.0,) * num_images,
        (5.0,) * num_images,
        (num_images,) * num_images,
        "",
    )
    span = Interval(0, 100)
    decoded(observer, span)
    observer.stage_ended("combine", observer.elapsed_ms())
    for row in range(num_images):
        timings = observer.timings_of_image(row, 2.0, {"a": span}, {"a": answer})
        observer.classified(answer_of("a", timings=timings), 0.25)


def test_the_stages_of_an_image_are_its_metrics_too(told):
    observer = arrived()
    one_answer(observer)
    assert told.observed(STAGE_MS) == {}
    observer.answered()
    assert told.observed(STAGE_MS) == {(stage, member or "none"): 1 for stage, member in STAGES}


def test_what_a_request_does_once_is_observed_once(told):
    observer = arrived()
    one_answer(observer, 3)
    observer.answered()
    observer.stage_ended("encode", observer.elapsed_ms())
    times = {stage: number for (stage, _), number in told.observed(STAGE_MS).items()}
    assert times == {"read": 1, "combine": 1, "decode": 3, "queue": 3, "infer": 3, "encode": 1}
    assert told.of(ENTROPY) == {(): 0.75}


def test_a_request_of_bad_files_only(told):
    arrived().answered()
    assert (told.observed(STAGE_MS), told.of(ANSWERS)) == ({}, {})
