"""The circuit breaker of the cache."""

from app.caching.breaker import LONGEST_S, RETRY_AFTER_S, Breaker
from tests.support.hand_clock import HandClock


def test_closed_it_allows_everything():
    breaker = Breaker(HandClock())
    assert all(breaker.allows() for _ in range(10))
    assert not breaker.succeeded()


def test_open_it_allows_one_trial_after_a_while():
    clock = HandClock()
    breaker = Breaker(clock)
    assert breaker.failed()
    assert not breaker.allows()
    clock.now += RETRY_AFTER_S
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    assert breaker.succeeded()
    assert all(breaker.allows() for _ in range(3))


def test_failures_of_tries_that_began_together_count_once():
    clock = HandClock()
    breaker = Breaker(clock)
    assert [breaker.failed() for _ in range(50)] == [True] + [False] * 49
    clock.now += RETRY_AFTER_S
    assert breaker.allows()


def test_each_trial_that_fails_doubles_the_wait_up_to_a_limit():
    clock = HandClock()
    breaker = Breaker(clock)
    breaker.failed()
    waits = []
    for _ in range(10):
        began = clock.now
        while not breaker.allows():
            clock.now += 0.25
        waits.append(clock.now - began)
        assert not breaker.failed()
    assert waits[:3] == [RETRY_AFTER_S, 2 * RETRY_AFTER_S, 4 * RETRY_AFTER_S]
    assert waits[-1] == LONGEST_S


def test_a_trial_that_never_tells_is_followed_by_another():
    clock = HandClock()
    breaker = Breaker(clock)
    breaker.failed()
    for _ in range(3):
        clock.now += RETRY_AFTER_S
        assert breaker.allows()
