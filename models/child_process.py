"""A child process: starts it, reads its output, ends it, and makes it end with its parent.

A child has its own session: Ctrl-C only reaches the parent, which ends the child and its
descendants. The child's standard input is closed when the parent ends in any way.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

REAPED_WITHIN_S = 15.0  # for a child that has closed its end, or was killed


class Child:
    """A running command; as a context manager it is killed at the end of the block.

    ``printed`` gets its standard error, and its standard output unless ``is_heard``, in which case
    :meth:`read_line` returns that. By default both are this process's, as the environment is.

    Raises:
        OSError: it could not be started.

    """

    def __init__(
        self,
        command: Sequence[str],
        printed: IO[bytes] | None = None,
        *,
        is_heard: bool = False,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),  # of files that it inherits
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if is_heard else printed,
            stderr=printed,
            pass_fds=descriptors,
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether the child has ended, or ends within ``within_s``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None

    def how_ended(self) -> str:
        """Return by which signal, or with which exit code, the child ended."""
        if not self.has_ended(REAPED_WITHIN_S):
            return "it no longer answers"
        code = self._process.returncode
        if code == -signal.SIGKILL:
            return "SIGKILL: memory ran out, most likely"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def read_line(self, deadline: float) -> bytes | None:
        """Return its next line; None at the end of its output, or at ``deadline``.

        ``deadline`` is by ``time.monotonic``.
        """
        assert self._process.stdout is not None
        pipe, line = self._process.stdout.fileno(), b""
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([pipe], [], [], left_s)[0]:
                break
            byte = os.read(pipe, 1)
            if not byte:
                break
            if byte == b"\n":
                return line
            line += byte
        return None

    def interrupt(self, patience_s: float) -> None:
        """End the child as Ctrl-C does, and wait at most ``patience_s``."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGINT)
        self.has_ended(patience_s)

    def end(self) -> None:
        """Kill the child and its descendants."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def last_words(log: Path) -> str:
    """Return the last line of a log that is not blank, without control characters."""
    try:
        lines = log.read_bytes()[-4096:].decode("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return "".join(character for character in last if character.isprintable())[:200]
