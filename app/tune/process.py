"""Controls a replica's child process: starts it, sends loads, notices its death, ends it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from app.compute.child_process import FunctionChild
from app.errors import ConfigError
from app.settings import Settings
from app.tune.replica import (
    REQUEST_S,
    LoadMeasured,
    LoadRequest,
    ReplicaFailed,
    ReplicaReady,
    serve_loads,
)

START_S = 600.0  # to compile every batch size of every member, on a slow machine without a cache
LATE_S = 15.0  # beyond a run's time and its requests' own
REMEDY = "free some memory, or try on fewer cores: taskset -c 0-3 tandem tune"
T = TypeVar("T", ReplicaReady, LoadMeasured)


class ReplicaProcess:
    """A child that runs the graph on ``cores``; :meth:`stop` must be called in the end.

    Raises:
        ConfigError: it could not be started.

    """

    def __init__(
        self,
        settings: Settings,
        cores: Sequence[int],
        photos: Path,
        run: Callable[..., None] = serve_loads,
    ) -> None:
        self._child = FunctionChild("a replica", run, settings, tuple(cores), photos, remedy=REMEDY)

    def wait_ready(self) -> ReplicaReady:
        """Wait until its networks are compiled.

        Raises:
            ConfigError: they could not be, or the process died.

        """
        return self._receive(ReplicaReady, START_S)

    def ask(self, load: LoadRequest) -> None:
        """Begin a run; :meth:`answer` waits for its end."""
        self._child.send(load)

    def answer(self, load: LoadRequest) -> LoadMeasured:
        """Wait for what the run gave, as :meth:`wait_ready` does."""
        return self._receive(LoadMeasured, 2 * load.seconds + REQUEST_S + LATE_S)

    def stop(self) -> None:
        """End the process at once; it has nothing to clean up."""
        self._child.end()

    def _receive(self, kind: type[T], timeout_s: float) -> T:
        message = self._child.receive(time.monotonic() + timeout_s)
        if isinstance(message, ReplicaFailed):
            raise ConfigError(f"a replica failed: {message.message}")
        if not isinstance(message, kind):
            raise ConfigError(
                f"a replica said nothing for {timeout_s:g} s; is the machine out of memory, or "
                "busy with something else?"
            )
        return message
