"""When a call is tried again, on a clock of the test's own."""

import pytest

from tandem_client import (
    BadImage,
    DeadlineExceeded,
    NotReady,
    Overloaded,
    RetryPolicy,
    ServiceError,
    TandemError,
    Unauthorized,
    Unreachable,
)
from tandem_client.exchange import Attempts, retry_after_s
from tests.support.hand_clock import HandClock

FULL = Overloaded("full", "overloaded")
SAFE = [FULL, NotReady("soon"), Unreachable("no", "refused"), Unreachable("no", "reset")]
OTHERS = [
    BadImage("no image"),
    DeadlineExceeded("late"),
    Unauthorized("no key"),
    ServiceError("a bug"),
    Unreachable("a certificate"),
]


def attempts(
    policy: RetryPolicy | None = None,
    timeout_s: float = 10.0,
    clock: HandClock | None = None,
    jitter: float = 1.0,
) -> Attempts:
    """Attempts whose random share of the longest wait is ``jitter``."""

    def uniform(low: float, high: float) -> float:
        return low + jitter * (high - low)

    return Attempts(policy or RetryPolicy(), timeout_s, clock or HandClock(), uniform)


@pytest.mark.parametrize("error", SAFE, ids=lambda error: str(error.reason))
def test_what_is_tried_again(error):
    tried = attempts()
    tried.begin()
    assert tried.wait_s(error) == pytest.approx(0.1)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_what_is_not(error):
    tried = attempts()
    tried.begin()
    with pytest.raises(type(error)) as caught:
        tried.wait_s(error)
    assert caught.value is error


def test_waits_double_up_to_the_longest_and_end_with_the_attempts():
    tried, waits = attempts(RetryPolicy(max_attempts=6, base_s=0.5, max_s=3.0), 100.0), []
    for _ in range(5):
        tried.begin()
        waits.append(tried.wait_s(FULL))
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
    tried.begin()
    with pytest.raises(Overloaded):
        tried.wait_s(FULL)


def test_a_thousand_attempts_still_have_a_wait():
    tried = attempts(RetryPolicy(max_attempts=10**6, base_s=0.001, max_s=0.002), 100.0)
    for _ in range(1100):
        tried.begin()
    assert tried.wait_s(FULL) == 0.002


def test_jitter_reaches_down_to_nothing():
    tried = attempts(jitter=0.0)
    tried.begin()
    assert tried.wait_s(FULL) == 0.0


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_never_before_retry_after(jitter):
    tried = attempts(jitter=jitter)
    tried.begin()
    wait = tried.wait_s(Overloaded("full", retry_after_s=3.0))
    assert 3.0 <= wait <= 3.1


@pytest.mark.parametrize("after_s", [10.0, 11.0, 1e9])
def test_never_past_the_deadline(after_s):
    error, tried = Overloaded("full", retry_after_s=after_s), attempts(timeout_s=10.0)
    tried.begin()
    with pytest.raises(Overloaded) as caught:
        tried.wait_s(error)
    assert caught.value is error  # what the service said, not that time was short


def test_an_attempt_has_what_is_left_of_the_time():
    clock = HandClock()
    tried = attempts(timeout_s=10.0, clock=clock)
    assert tried.begin() == 10.0
    clock.now += 7.5
    assert tried.begin() == 2.5
    clock.now += 2.5
    with pytest.raises(DeadlineExceeded, match=r"no answer within 10 s; .*timeout"):
        tried.begin()


def test_one_attempt_is_one_attempt():
    tried = attempts(RetryPolicy(max_attempts=1))
    tried.begin()
    with pytest.raises(Overloaded):
        tried.wait_s(FULL)


def test_a_caller_says_after_what():
    tried = attempts(RetryPolicy(on=frozenset({"refused"})))
    tried.begin()
    assert tried.wait_s(Unreachable("no", "refused")) > 0
    with pytest.raises(TandemError):
        tried.wait_s(FULL)


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"base_s": -1}, {"max_s": -1}])
def test_a_policy_that_makes_no_sense(wrong):
    with pytest.raises(ValueError, match="at least 1 attempt"):
        RetryPolicy(**wrong)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_time_that_is_none(timeout):
    with pytest.raises(ValueError, match="a number above 0"):
        attempts(timeout_s=timeout)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("0", 0.0),
        ("7", 7.0),
        (" 12 ", 12.0),
        ("9" * 400, 999999999.0),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 50.0),
        ("Thu, 01 Jan 1970 00:01:00 -0000", 50.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        ("", None),
        ("-3", None),
        ("1.5", None),
        ("²", None),
        ("soon", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header, seconds):
    assert retry_after_s(header, now=lambda: 10.0) == seconds
