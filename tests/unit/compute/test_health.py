"""What Serve is told of a stage's work."""

import asyncio

import pytest

from app.compute.health import MAX_FAILURES, MAX_RUN_S, Health
from app.errors import UnhealthyError


def fail(health: Health, error: BaseException, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(type(error)), health.run():
            raise error


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def health(clock) -> Health:
    return Health("batch of resnet50", lambda: clock[0])


def test_failures_in_a_row(health):
    health.check()
    fail(health, RuntimeError("no memory"), MAX_FAILURES - 1)
    health.check()
    with health.run():
        pass  # one success and all is forgiven
    fail(health, RuntimeError("no memory"), MAX_FAILURES)
    with pytest.raises(UnhealthyError, match="3 times in a row a batch of resnet50 failed"):
        health.check()


def test_a_caller_that_goes_away_is_no_failure(health):
    fail(health, asyncio.CancelledError(), 10)
    health.check()


def test_a_batch_that_does_not_end(health, clock):
    with health.run():
        clock[0] += MAX_RUN_S
        with health.run():
            pass
        health.check()
        clock[0] += 1.0
        with pytest.raises(UnhealthyError, match="has run for 31 s, the limit is 30"):
            health.check()
    health.check()


def test_what_a_clients_file_may_cause_is_not_counted(clock):
    health = Health("file that is decoded", lambda: clock[0], counts_failures=False)
    fail(health, RuntimeError("damaged"), 10 * MAX_FAILURES)
    health.check()
    with health.run():
        clock[0] += MAX_RUN_S + 1
        with pytest.raises(UnhealthyError, match="a file that is decoded has run for 31 s"):
            health.check()
