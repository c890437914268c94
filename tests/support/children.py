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


def ignores_ctrl_c(send: Send) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tells_and_hangs(send)
