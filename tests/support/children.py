"""What runs in a child process: it answers, dies or hangs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from models.child_process import Send
from models.errors import ModelSetError

SLEEPS = "import time; time.sleep(600)"


def adds(first: int, second: int) -> int:
    return first + second


def tells_and_adds(first: int, second: int, send: Send) -> int:
    for number in (first, second):
        send(number)
    return first + second


def refuses(message: str) -> None:
    raise ModelSetError(message)


def refuses_and_ends_slowly(message: str) -> None:
    """Refuse; the process takes a while to end after that was sent, as beside busy ones."""
    end = os._exit

    def late(code: int) -> None:
        time.sleep(0.5)
        end(code)

    os._exit = late  # type: ignore[assignment]
    raise ModelSetError(message)


def runs(code: str, *arguments: object) -> object:
    """Run ``code``, which may use ``arguments`` and set ``result``."""
    names = {"arguments": arguments, "result": None}
    exec(code, names)  # a test's own
    return names["result"]


def tells_and_hangs(send: Send) -> None:
    """Send the numbers of this process and of its own child, then hang."""
    with subprocess.Popen([sys.executable, "-c", SLEEPS]) as child:
        send((os.getpid(), child.pid))
        time.sleep(600)


def cleans_up(folder: Path, send: Send) -> None:
    """Leave a file that says how this ended."""
    try:
        tells_and_hangs(send)
    finally:
        (folder / "cleaned-up").touch()


def makes_an_error_of_ctrl_c(send: Send) -> None:
    """Do as libraries with callbacks do."""
    try:
        tells_and_hangs(send)
    except KeyboardInterrupt as error:
        raise RuntimeError("a callback failed") from error


def ignores_ctrl_c(send: Send) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tells_and_hangs(send)
