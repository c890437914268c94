"""The request's clock: durations from elsewhere, placed within what the Gateway timed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.graph.timeline import Interval, Timeline
from app.messages import MemberAnswer

BOUNDED = settings(max_examples=100, deadline=None, database=None)
MS = st.floats(0, 1e5)


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
    timeline = Timeline()
    answer = MemberAnswer(np.zeros((1, 3), np.float32), (queue,), (infer,), (4,), "")
    span = Interval(hop[0], hop[0] + hop[1])
    timings = timeline.of_image(0, span, decode, {"m": span}, {"m": answer})
    assert all(stage.start_ms >= 0 and stage.duration_ms >= 0 for stage in timings.stages)
    assert timings.total >= 0
    queued, ran = timings.stages[2:4]
    assert (queued.stage, queued.member, queued.batch_size) == ("queue", "m", None)
    assert (ran.stage, ran.member, ran.batch_size) == ("infer", "m", 4)
    assert ran.start_ms == pytest.approx(queued.start_ms + queued.duration_ms, abs=0.0021)


def test_each_image_has_its_own_durations():
    timeline = Timeline()
    answer = MemberAnswer(np.zeros((2, 3), np.float32), (3.0, 4.0), (5.0, 6.0), (1, 2), "")
    span = Interval(0, 100)
    second = timeline.of_image(1, span, 2.0, {"m": span}, {"m": answer})
    found = {s.stage: (s.duration_ms, s.batch_size) for s in second.stages}
    assert found["decode"] == (2.0, None)
    assert found["queue"] == (4.0, None)
    assert found["infer"] == (6.0, 2)


def test_a_block_is_measured_even_when_it_fails():
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.measure() as span:
        raise KeyError
    assert 0 <= span.start_ms <= span.end_ms <= timeline.elapsed_s() * 1e3
