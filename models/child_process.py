"""Child processes that end with their parent: a command, or a function of ours run apart.

A child has its own session: Ctrl-C only reaches the parent, which ends the child and its
descendants. The child's standard input is closed when the parent ends in any way.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, Self

from models.errors import TandemError

REAPED_WITHIN_S = 15.0  # for a child that has closed its end, or was killed
OUT_OF_MEMORY = "SIGKILL: memory ran out, most likely"
Send = Callable[[Any], None]  # sends an object to the parent


class ChildDiedError(Exception):
    """A child ended without a result; the message names its signal or exit code."""


class Child:
    """A running command; as a context manager it is killed at the end of the block.

    ``printed`` gets its standard error and its standard output. By default both are this process's,
    as the environment is. Raises :class:`OSError` if it could not be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        printed: IO[bytes] | None = None,
        *,
        output: IO[bytes] | int | None = None,  # its standard output, if not ``printed``
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),  # of files that it inherits
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output or printed,
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
            return OUT_OF_MEMORY
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def interrupt(self, patience_s: float) -> None:
        """End the child as Ctrl-C does, and wait at most ``patience_s``."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGINT)
        self.has_ended(patience_s)

    def end(self, patience_s: float = 0.0) -> None:
        """Close the child's standard input, wait ``patience_s``, and kill what still runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self.has_ended(patience_s)
        finally:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its descendants too
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def run_apart(
    function: Callable[..., Any],
    *arguments: object,
    heard: Callable[[Any], float | None] | None = None,
    limit_s: float | None = None,
    printed: IO[bytes] | None = None,
    patience_s: float = 0.0,
) -> Any:
    """Return ``function(*arguments)``, computed in a new process that ends before this returns.

    Function, arguments and result are pickled, so the function must be a module's.

    Args:
        function: runs on the main thread of the process.
        arguments: for the function.
        heard: if not None, the function gets a :data:`Send` as its last argument, whose objects
           ``heard`` gets here. If ``heard`` returns a number, that is the limit from then on.
        limit_s: the time until the result, in seconds; None: no limit.
        printed: the log of the process; by default it has this process's standard error.
        patience_s: how long the function may clean up after Ctrl-C, a limit, or the end of this
           process, when it gets a KeyboardInterrupt. At 0 it is killed at once.

    Raises:
        ChildDiedError: the process did not start, crashed, or raised an error of another class.
        TandemError: as raised by the function.
        TimeoutError: the limit has passed.
    """
    ours, theirs = Pipe()
    line = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(patience_s)]
    with ours:
        try:
            with theirs:
                numbers = [theirs.fileno()]
                nowhere = subprocess.DEVNULL
                child = Child(line, printed, output=printed or nowhere, descriptors=numbers)
        except OSError as error:
            raise ChildDiedError(f"it could not be started: {error}") from error
        try:
            with contextlib.suppress(BrokenPipeError):  # it died, and receiving says how
                ours.send(sys.path)
                ours.send((function, arguments, heard is not None))
            return _result(child, ours, heard, limit_s)
        finally:
            child.end(patience_s)


def _result(
    child: Child,
    pipe: Connection,
    heard: Callable[[Any], float | None] | None,
    limit_s: float | None,
) -> Any:
    """Pass on what the child says until its result comes; raises as :func:`run_apart` does."""
    since = time.monotonic()
    kind: str
    value: Any
    while True:
        left_s = None if limit_s is None else max(0.0, since + limit_s - time.monotonic())
        try:
            kind, value = pipe.recv() if pipe.poll(left_s) else ("late", None)
        except Exception as error:  # its end, or no pickle
            raise ChildDiedError(child.how_ended()) from error
        if kind == "late":
            raise TimeoutError(f"no result within {limit_s:g} s")
        if kind == "failed":
            raise value
        if kind == "returned":
            return value
        if heard is not None and (new_limit_s := heard(value)) is not None:
            limit_s, since = new_limit_s, time.monotonic()


def last_words(log: Path) -> str:
    """Return the last line of a log that is not blank, without control characters."""
    try:
        lines = log.read_bytes()[-4096:].decode("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return "".join(character for character in last if character.isprintable())[:200]


def _run(descriptor: int, patience_s: float) -> None:
    """Run in the process of :func:`run_apart`: receive the function, call it, send its result."""
    threading.Thread(target=_end_with_parent, args=[patience_s], daemon=True).start()
    try:
        with Connection(descriptor) as pipe:
            sys.path[:] = pipe.recv()  # before the function, whose module may be in one of these
            function, arguments, is_heard = pipe.recv()
            send: list[Send] = [lambda value: pipe.send(("said", value))] if is_heard else []
            try:
                answer = "returned", function(*arguments, *send)
            except TandemError as error:
                answer = "failed", error
            # The parent goes on once it has the answer, which must not interrupt this end.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            pipe.send(answer)
    except (KeyboardInterrupt, BrokenPipeError):  # nobody waits for the result
        os.killpg(0, signal.SIGKILL)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without waiting for the threads of a runtime


def _end_with_parent(patience_s: float) -> None:
    """Interrupt, then kill this process and its descendants once its standard input is closed.

    Only the function is interrupted: what it returned or raised is sent without.
    """
    while os.read(0, 1):
        pass
    if patience_s:
        # Nobody reads what a library makes of the interrupt: 40 lines of it hid a refusal.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(patience_s)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _run(int(sys.argv[1]), float(sys.argv[2]))
