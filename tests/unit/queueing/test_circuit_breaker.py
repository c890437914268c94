"""The circuit breaker: of the cache's Redis, of members, of a spans' endpoint."""

import pytest

from app.queueing.overload import CircuitBreaker
from tests.support.hand_clock import HandClock

FIRST_S, LONGEST_S = 1.0, 10.0


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(FIRST_S, LONGEST_S, clock)


def test_closed_it_allows_everything(breaker):
    assert all(breaker.allows() for _ in range(10))
    assert not breaker.succeeded()
    assert not breaker.is_open


def test_open_it_allows_one_trial_after_a_while(breaker, clock):
    assert breaker.failed()
    assert breaker.is_open
    assert not breaker.allows()
    clock.now += FIRST_S
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    assert breaker.succeeded()
    assert all(breaker.allows() for _ in range(3))


def test_failures_of_tries_that_began_together_count_once(breaker, clock):
    assert [breaker.failed() for _ in range(50)] == [True] + [False] * 49
    clock.now += FIRST_S
    assert breaker.allows()


def test_each_trial_that_fails_doubles_the_wait_up_to_a_limit(breaker, clock):
    breaker.failed()
    assert waits_of_trials_that_fail(breaker, clock) == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    breaker.succeeded()
    breaker.failed()
    assert waits_of_trials_that_fail(breaker, clock)[0] == FIRST_S  # anew


def test_it_can_try_at_one_pace(clock):
    breaker = CircuitBreaker(FIRST_S, FIRST_S, clock)
    breaker.failed()
    assert waits_of_trials_that_fail(breaker, clock) == [FIRST_S] * 6


def waits_of_trials_that_fail(breaker, clock):
    waits = []
    for _ in range(6):
        began = clock.now
        while not breaker.allows():
            clock.now += 0.25
        waits.append(clock.now - began)
        assert not breaker.failed()
    return waits


def test_a_trial_that_never_tells_is_followed_by_another(breaker, clock):
    breaker.failed()
    for _ in range(3):
        clock.now += FIRST_S
        assert breaker.allows()


def test_without_a_wait_the_next_try_is_a_trial(clock):
    breaker = CircuitBreaker(0.0, 0.0, clock)
    assert breaker.failed()
    assert breaker.allows()
    assert not breaker.failed()
    assert breaker.succeeded()
