"""The pace: how long those who come will wait, on a clock that the test moves."""

import math

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from app.queueing.service_rate import MIN_COMPLETED, TIME_CONSTANT_S, ServiceRate
from tests.support.hand_clock import HandClock


def worked(clock: HandClock, num: int, each_s: float, idle_s: float = 0.0) -> ServiceRate:
    """Return the pace of a place that did ``num`` things, one at a time."""
    pace = ServiceRate(clock)
    for _ in range(num):
        pace.arrived()
        clock.now += each_s
        pace.done()
        clock.now += idle_s
    return pace


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def test_nothing_is_known_at_first(clock):
    pace = ServiceRate(clock)
    pace.arrived(100)
    clock.now += 60
    assert pace.wait_s(100) == 0.0


@pytest.mark.parametrize("idle_s", [0.0, 0.5, 60.0])
def test_time_without_work_does_not_count(clock, idle_s):
    assert worked(clock, 200, 0.05, idle_s).wait_s(20) == pytest.approx(1.0, rel=0.02)


def test_many_at_a_time_are_a_better_pace(clock):
    pace = ServiceRate(clock)
    for _ in range(100):
        pace.arrived(8)
        clock.now += 0.4
        pace.done(8)
    assert pace.wait_s(20) == pytest.approx(1.0, rel=0.1)


def test_what_hangs_slows_the_pace_while_it_hangs(clock):
    pace = worked(clock, 200, 0.05)
    pace.arrived(20)
    before = pace.wait_s(20)
    clock.now += TIME_CONSTANT_S
    assert pace.wait_s(20) > 2 * before


def test_a_burst_at_which_the_first_answers_come_late_is_no_slow_service(clock):
    pace = worked(clock, 400, 0.05)
    pace.arrived(100)
    clock.now += 1.0
    assert pace.wait_s(100) < 6.0


def test_a_few_are_no_measure(clock):
    pace = worked(clock, MIN_COMPLETED - 1, 1.0)
    pace.arrived(100)
    assert pace.wait_s(100) == 0.0


def test_a_pace_of_long_ago_is_forgotten(clock):
    pace = worked(clock, 200, 1.0)
    for _ in range(1200):
        pace.arrived()
        clock.now += 0.1
        pace.done()
    assert pace.wait_s(10) == pytest.approx(1.0, rel=0.2)


def test_who_gives_up_makes_it_no_better(clock):
    pace = worked(clock, 200, 0.05)
    pace.arrived(50)
    clock.now += 1.0
    before = pace.wait_s(10)
    pace.abandoned(50)
    assert pace.num_present == 0
    assert pace.wait_s(10) == pytest.approx(before)


@hypothesis_settings(max_examples=100, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["arrived", "done", "abandoned"]), st.floats(0, 1e6))),
)
def test_it_is_never_negative_nor_nan(steps):
    clock = HandClock()
    pace = ServiceRate(clock)
    for step, seconds in steps:
        clock.now += seconds
        if step == "arrived" or pace.num_present:
            getattr(pace, step)()
        assert 0 <= pace.wait_s(5) < math.inf
        assert pace.num_present >= 0
