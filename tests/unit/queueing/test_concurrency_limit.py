"""How many requests may be under way, when more come than are answered, and when that is over."""

import pytest

from app.queueing.concurrency_limit import (
    MAX_BACKLOG_S,
    QUIET_ADMITTED,
    QUIET_S,
    ConcurrencyLimit,
    limit_of,
)
from app.settings import Settings

TWO_CORES = (2, 8, 0.05)  # cores, the largest batch, and the wait, s
RATE = 100.0


def overloaded(rate: float = RATE, most: int = 128) -> ConcurrencyLimit:
    """Return one that saw a second of answers between two refusals, all places taken."""
    limit = ConcurrencyLimit(most, *TWO_CORES)
    limit.refused(0.0, most)
    for number in range(int(rate)):
        limit.answered((number + 1) / rate, most)
    limit.refused(1.0, most, num=int(rate))
    return limit


def test_under_overload_batches_are_full_and_few_wait_beside():
    limit = overloaded()
    assert limit.is_on
    assert limit.value == 16 + 5  # two cores' batches, and 50 ms at 100/s


@pytest.mark.parametrize(("rate", "expected"), [(40.0, 18), (400.0, 36), (20_000.0, 128)])
def test_the_number_follows_the_rate_within_its_bounds(rate, expected):
    assert overloaded(rate=rate).value == expected


def test_one_refusal_is_no_overload():
    limit = ConcurrencyLimit(128, *TWO_CORES)
    for at in (0.0, 0.01, 0.02):  # a burst: nobody was answered between
        limit.refused(at, 128)
    assert not limit.is_on


def test_overload_is_known_when_a_quarter_of_the_crowd_was_answered():
    limit = ConcurrencyLimit(128, *TWO_CORES)
    limit.refused(0.0, 128)
    for number in range(31):
        limit.answered((number + 1) / RATE, 128)
    limit.refused(0.4, 128)
    assert not limit.is_on
    limit.answered(0.5, 128)
    limit.refused(0.5, 128)
    assert limit.is_on


def test_a_stall_is_no_overload():
    """A crowd that came of one goes when it is over; who is refused later begins anew."""
    limit = ConcurrencyLimit(128, *TWO_CORES)
    limit.refused(0.0, 128)
    for left in range(127, 60, -1):
        limit.answered(5.0 + (128 - left) / RATE, left)
    assert not limit.crowd
    limit.refused(7.0, 128)
    assert not limit.is_on


def test_now_and_then_one_refusal_is_no_overload():
    """As many clients as there are places keep them taken; a probe beside them finds none."""
    limit = ConcurrencyLimit(128, *TWO_CORES)
    for number in range(1000):
        now = number / RATE
        limit.answered(now, 127)
        if number % 100 == 0:
            limit.refused(now, 128)
    assert not limit.is_on


def test_refusals_that_are_told_late_are_none_of_now():
    """HAProxy tells of them with the next request, be it minutes later."""
    limit = ConcurrencyLimit(128, *TWO_CORES)
    limit.refused(60.0, 0)
    assert not limit.crowd


def test_a_slow_window_does_not_make_the_service_slow():
    limit = overloaded()
    at = 1.0
    for _ in range(6):
        at += 1.0
        for _ in range(40):
            limit.answered(at, 20)  # 40/s
    assert limit.value == 21


def test_it_is_over_when_nobody_was_refused_for_a_while():
    limit = overloaded()
    now = 1.0
    for _ in range(QUIET_ADMITTED):
        now += 2 * QUIET_S / QUIET_ADMITTED
        assert limit.is_on
        limit.admitted(now)
    assert not limit.is_on
    assert not limit.crowd


def test_a_refusal_makes_the_quiet_time_begin_anew():
    limit = overloaded()
    for number in range(10 * QUIET_ADMITTED):
        now = 1.0 + number * QUIET_S / QUIET_ADMITTED
        limit.admitted(now)
        if number % (QUIET_ADMITTED // 2) == 0:
            limit.refused(now, 20)
    assert limit.is_on


def test_it_is_over_when_all_that_came_could_have_been_answered():
    limit = overloaded()
    for _ in range(50):  # at once, on top of a second's work
        limit.arrived(1.0)
    limit.refused(1.0, 128)
    limit.arrived(1.0 + MAX_BACKLOG_S)  # 100 came, and 90 would have been answered
    assert limit.is_on
    limit.arrived(1.3 + MAX_BACKLOG_S)
    assert not limit.is_on


def test_forms_of_many_files_are_fewer_requests():
    limit = overloaded(rate=100.0)
    limit.images_per_request = 16.0
    assert limit.value == 8  # one on each core and one that is read, and 5 for the rate
    limit.images_per_request = 1.0
    assert limit.value == 21


@pytest.mark.parametrize(
    "changed", [{"members": "deployment"}, {"target_wait_ms": None}], ids=lambda value: str(value)
)
def test_where_there_is_no_such_limit(changed):
    assert limit_of(Settings(), 2) is not None
    assert limit_of(Settings(**changed), 2) is None
