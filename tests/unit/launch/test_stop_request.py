"""Which signals ask the service to stop."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from app.launch.ray_cluster import SIGNALS, stop_signals

# Python's own handler runs only between two steps of Python: here there is none.
SCRIPT = """
import ctypes, signal
from app.launch.ray_cluster import ending_on_signal
signal.signal(signal.SIGINT, lambda *_: None)
with ending_on_signal("before"):
    pass
with ending_on_signal("the last word"):
    print("connecting", flush=True)
    while True:
        ctypes.CDLL(None).sleep(60)
"""

# Python may run a handler before any line of the main thread, those of a wait included.
AT_EACH_LINE = """
import signal, sys
from app.launch.ray_cluster import stop_signals
with stop_signals() as stop:
    handler = signal.getsignal(signal.SIGTERM)
    def trace(*_):
        handler(signal.SIGTERM, None)
        return trace
    sys.settrace(trace)
    stop.wait(1)
    handler(signal.SIGTERM, None)
    sys.settrace(None)
    print(stop.is_set())
"""


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_asks_and_has_its_handler_back_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_signals() as stop:
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
    with stop_signals() as stop:
        os.kill(os.getpid(), number)
        assert stop.is_set() is is_ours
    assert signal.getsignal(number) is signal.SIG_IGN


def test_a_signal_ends_what_hears_none() -> None:
    command = [sys.executable, "-c", SCRIPT]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "connecting\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == "the last word\n"


def test_a_signal_at_any_line_of_a_wait_or_of_another_signal() -> None:
    command = [sys.executable, "-c", AT_EACH_LINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "True\n"


def test_a_wait_ends_with_its_time_or_with_the_signal() -> None:
    with stop_signals() as stop:
        assert not stop.wait(0.01)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert stop.wait()
        assert stop.wait(0.01)  # it stays set
