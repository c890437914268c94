"""Runs a command that is interrupted (SIGINT) when the process that started it ends, even killed.

``ends_with_parent.py PARENT COMMAND...`` asks the kernel for the signal and becomes the command:
the process id stays the same, and what the command starts gets no such signal. A service that takes
a whole Ray along when it is interrupted so ends with a test run that nobody could tell to stop it.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT_ENDED = 70


def ending_with_parent(command: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the command line; the thread that starts it must live as long as it should."""
    return [
        sys.executable,
        "-IS",
        __file__,
        str(os.getpid()),
        *(os.fspath(part) for part in command),
    ]


def main() -> None:
    """Become the command."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGINT) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    parent, *command = sys.argv[1:]
    if os.getppid() != int(parent):  # it ended before the kernel was asked
        sys.exit(PARENT_ENDED)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
