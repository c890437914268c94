"""Which signals ask the service to stop."""

import os
import signal
from collections.abc import Iterator

import pytest

from app.launch.stop_request import SIGNALS, StopRequest


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_asks_and_has_its_handler_back_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop.wait(10)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    ("number", "is_ours"),
    [(signal.SIGHUP, False), (signal.SIGINT, True), (signal.SIGTERM, True)],
)
def test_a_hang_up_that_was_ignored_is_not_ours(number: signal.Signals, is_ours: bool) -> None:
    """``nohup`` ignores it; a script's ``&`` ignores SIGINT, which ``kill`` may send after all."""
    signal.signal(number, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        assert stop.is_asked is is_ours
    assert signal.getsignal(number) is signal.SIG_IGN
