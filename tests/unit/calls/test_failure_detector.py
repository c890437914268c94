"""Replicas that say nothing: when they count as silent, and when they are asked."""

import pytest

from app.calls.failure_detector import ASK_EVERY_S, SILENT_AFTER_S, Silence
from tests.support.hand_clock import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def silence(clock: HandClock) -> Silence:
    return Silence(clock)


def test_who_was_asked_nothing_is_not_silent(silence: Silence, clock: HandClock) -> None:
    clock.now += 1000
    assert not silence.is_silent("a")


def test_one_that_does_not_answer_is_silent_after_a_while(
    silence: Silence, clock: HandClock
) -> None:
    silence.asked("a")
    clock.now += SILENT_AFTER_S
    silence.asked("a")  # since the first one
    assert not silence.is_silent("a")
    clock.now += 0.01
    assert silence.is_silent("a")
    assert not silence.is_silent("b")


def test_a_sign_of_life_ends_it(silence: Silence, clock: HandClock) -> None:
    silence.asked("a")
    clock.now += 2 * SILENT_AFTER_S
    silence.heard("a")
    assert not silence.is_silent("a")
    silence.asked("a")
    assert not silence.is_silent("a")


def test_a_silent_one_is_asked_once_every_so_often(silence: Silence, clock: HandClock) -> None:
    assert silence.is_to_be_asked("a")
    clock.now += ASK_EVERY_S / 2
    assert not silence.is_to_be_asked("a")
    clock.now += ASK_EVERY_S
    assert silence.is_to_be_asked("a")


def test_replicas_that_are_gone_are_forgotten(silence: Silence, clock: HandClock) -> None:
    silence.asked("a")
    silence.asked("b")
    silence.keep(["b"])
    clock.now += 2 * SILENT_AFTER_S
    assert not silence.is_silent("a")
    assert silence.is_silent("b")
