"""A child process: starts it, ends it, and makes it end with its parent.

The load generator, the replicas of ``tandem tune`` and the fork server are children. A child has
its own session: Ctrl-C only reaches the parent, which ends the child. The child's standard input is
closed when the parent ends in any way, and then the child must end.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any, Self

from app.errors import ConfigError

REAPED_WITHIN_S = 15.0  # for a child that has closed its end, or was killed
MEMORY_REMEDY = "is memory left?"
OUT_OF_MEMORY = "signal 9: memory ran out, most likely"


class Child:
    """A running command; as a context manager it ends with the block.

    Args:
        name: for errors: "a replica".
        command: the program and its arguments.
        output, errors: its standard output and error; None: this process's.
        descriptors: files that it inherits.
        environment: its environment; None: this process's.
        patience_s: how long it may take to end by itself; after an error it is killed at once.
        has_session: whether it is shielded from Ctrl-C, and its descendants are killed with it.
        remedy: advice for the error if it cannot be started, or dies.

    Raises:
        ConfigError: it could not be started.

    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        output: int | None = subprocess.DEVNULL,
        errors: int | None = None,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
        has_session: bool = True,
        remedy: str = MEMORY_REMEDY,
    ) -> None:
        self._name, self._remedy = name, remedy
        self._patience_s, self._has_session = patience_s, has_session
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                pass_fds=descriptors,
                env=environment,
                start_new_session=has_session,
            )
        except OSError as error:
            raise ConfigError(f"{name} could not be started: {error}; {remedy}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def how_ended(self) -> str:
        """Return by which signal, or with which exit code, the child ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAPED_WITHIN_S)
        code = self._process.returncode
        if code is None:
            return "it no longer answers"
        if code == -signal.SIGKILL:
            return OUT_OF_MEMORY
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def death(self) -> ConfigError:
        """Return the error for a child that ended too early."""
        return ConfigError(f"{self._name} died ({self.how_ended()}); {self._remedy}")

    def ask_to_end(self) -> None:
        """Close its standard input, and return at once."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self, patience_s: float | None = None) -> None:
        """Ask the child to end; after ``patience_s`` kill it and its descendants.

        None stands for the patience that the constructor got.
        """
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._patience_s if patience_s is None else patience_s)
        if self._has_session:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.end(None if error is None else 0.0)


class FunctionChild(Child):
    """A child that runs one of our functions, and exchanges objects with it.

    ``function`` gets the arguments and its end of the connection; all must be picklable.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., None],
        *arguments: object,
        remedy: str = MEMORY_REMEDY,
    ) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-P", "-m", __name__, str(number)]
            super().__init__(name, command, output=None, descriptors=[number], remedy=remedy)
        try:
            self.send(sys.path)
            self.send((function, arguments))
        except BaseException:
            self.end()
            raise

    def send(self, message: object) -> None:
        """Send an object; raise :class:`ConfigError` if the child died."""
        try:
            self._connection.send(message)
        except OSError:
            raise self.death() from None

    def receive(self, deadline: float) -> Any:
        """Return the next object; None at the deadline; raise :class:`ConfigError` if it died."""
        try:
            if self._connection.poll(max(0.0, deadline - time.monotonic())):
                return self._connection.recv()
        except (EOFError, OSError):
            raise self.death() from None
        return None

    def end(self, patience_s: float | None = None) -> None:
        super().end(patience_s)
        self._connection.close()


def run_function(descriptor: int) -> None:
    """Run in a :class:`FunctionChild`: receive the function and call it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with Connection(descriptor) as connection:
        sys.path[:] = connection.recv()  # before the function, whose module may be found through it
        function, arguments = connection.recv()
        function(*arguments, connection)


def _end_with_parent() -> None:
    """Kill this process's group once the other end of its standard input is closed."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    run_function(int(sys.argv[1]))
