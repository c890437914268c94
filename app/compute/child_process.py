"""A child process that runs one of our functions, and ends with its parent.

``tandem bench`` runs its load generator in it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from app.errors import ConfigError
from models.child_process import Child

REMEDY = "is memory left?"


class FunctionChild(Child):
    """A child that runs one of our functions, and exchanges objects with it.

    Args:
        name: for errors: "the load generator".
        function: gets the arguments and its end of the connection; all must be picklable.
        arguments: for the function.

    Raises:
        ConfigError: it could not be started.

    """

    def __init__(self, name: str, function: Callable[..., None], *arguments: object) -> None:
        self._name = name
        self._connection, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            try:
                super().__init__(
                    [sys.executable, "-P", "-m", __name__, str(number)], descriptors=[number]
                )
            except OSError as error:
                raise ConfigError(f"{name} could not be started: {error}; {REMEDY}") from error
        try:
            self.send(sys.path)
            self.send((function, arguments))
        except BaseException:
            self.end()
            raise

    def death(self) -> ConfigError:
        """Return the error for a child that ended too early."""
        return ConfigError(f"{self._name} died ({self.how_ended()}); {REMEDY}")

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

    def end(self) -> None:
        super().end()
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
