"""What all tests of the launch need."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def hang_up() -> Iterator[None]:
    """Let SIGHUP have its effect, which nohup takes away: tests send it, and look at it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
