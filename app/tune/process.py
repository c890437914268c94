"""Controls a replica's child process: starts it, sends loads, notices its death, ends it."""

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

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
GRACE_S = 15.0  # beyond a run's time and its requests' own
T = TypeVar("T", ReplicaReady, LoadMeasured)


class ReplicaProcess:
    """A child that runs the graph on ``cores``; :meth:`stop` must be called in the end."""

    def __init__(
        self,
        settings: Settings,
        cores: Sequence[int],
        photos: Path,
        run: Callable[..., None] = serve_loads,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (settings, tuple(cores), photos, theirs)
        self._process = context.Process(target=run, args=arguments, daemon=True)
        try:
            with _deaf_child():
                self._process.start()
        except OSError as error:
            raise ConfigError(
                f"a replica could not be started: {error}; is memory left?"
            ) from error
        finally:
            theirs.close()

    def wait_ready(self) -> ReplicaReady:
        """Wait until its networks are compiled.

        Raises:
            ConfigError: they could not be, or the process died.

        """
        return self._receive(ReplicaReady, START_S)

    def ask(self, load: LoadRequest) -> None:
        """Begin a run; :meth:`answer` waits for its end."""
        try:
            self._pipe.send(load)
        except OSError:
            raise self._death() from None

    def answer(self, load: LoadRequest) -> LoadMeasured:
        """Wait for what the run gave, as :meth:`wait_ready` does."""
        return self._receive(LoadMeasured, 2 * load.seconds + REQUEST_S + GRACE_S)

    def stop(self) -> None:
        """End the process at once; it has nothing to clean up."""
        self._process.kill()
        self._process.join(GRACE_S)
        self._pipe.close()

    def _receive(self, kind: type[T], timeout_s: float) -> T:
        message = self._next(time.monotonic() + timeout_s)
        if isinstance(message, ReplicaFailed):
            raise ConfigError(f"a replica failed: {message.message}")
        if not isinstance(message, kind):
            raise ConfigError(
                f"a replica said nothing for {timeout_s:g} s; is the machine out of memory, or "
                "busy with something else?"
            )
        return message

    def _next(self, deadline: float) -> Any:
        """Return the next message, None if none came in time."""
        while (left_s := deadline - time.monotonic()) > 0:
            if self._pipe.poll(min(left_s, 0.5)):
                try:
                    return self._pipe.recv()
                except (EOFError, OSError):
                    raise self._death() from None
        return None

    def _death(self) -> ConfigError:
        self._process.join(GRACE_S)
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        why = "memory ran out, most likely" if code == -signal.SIGKILL else "see above"
        return ConfigError(
            f"a replica died ({how}: {why}); free some memory, or try on fewer cores: "
            "taskset -c 0-3 tandem tune"
        )


@contextmanager
def _deaf_child() -> Iterator[None]:
    """Let a process started inside ignore Ctrl-C from its first moment, not only when it can."""
    if threading.current_thread() is not threading.main_thread():  # only that one sets handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
