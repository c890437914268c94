"""Replicas that say nothing: when they count as silent, and when they are asked."""

import pytest

from app.serve.channels import SUSPECT_AFTER_S
from app.serve.locality_router import PROBE_EVERY_S, FailureDetector
from tests.support.hand_clock import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def silence(clock: HandClock) -> FailureDetector:
    return FailureDetector(clock)


def test_who_was_asked_nothing_is_not_silent(silence: FailureDetector, clock: HandClock) -> None:
    clock.now += 1000
    assert not silence.is_suspected("a")


def test_one_that_does_not_answer_is_silent_after_a_while(
    silence: FailureDetector, clock: HandClock
) -> None:
    silence.call_sent("a")
    clock.now += SUSPECT_AFTER_S
    silence.call_sent("a")  # since the first one
    assert not silence.is_suspected("a")
    clock.now += 0.01
    assert silence.is_suspected("a")
    assert not silence.is_suspected("b")


def test_a_sign_of_life_ends_it(silence: FailureDetector, clock: HandClock) -> None:
    silence.call_sent("a")
    clock.now += 2 * SUSPECT_AFTER_S
    silence.heard_from("a")
    assert not silence.is_suspected("a")
    silence.call_sent("a")
    assert not silence.is_suspected("a")


def test_a_silent_one_is_asked_once_every_so_often(
    silence: FailureDetector, clock: HandClock
) -> None:
    assert silence.should_probe("a")
    clock.now += PROBE_EVERY_S / 2
    assert not silence.should_probe("a")
    clock.now += PROBE_EVERY_S
    assert silence.should_probe("a")


def test_replicas_that_are_gone_are_forgotten(silence: FailureDetector, clock: HandClock) -> None:
    silence.call_sent("a")
    silence.call_sent("b")
    silence.retain(["b"])
    clock.now += 2 * SUSPECT_AFTER_S
    assert not silence.is_suspected("a")
    assert silence.is_suspected("b")
