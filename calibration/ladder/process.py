"""Starts the process of a rung, follows its events, and ends it."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from calibration.ladder.power import PackagePower
from calibration.ladder.rung import LadderError, RungError, RungResult, RungTask, read_result
from calibration.ladder.store import Store
from models.child_process import Child, last_words
from models.result_files import write_result

WORKER = "calibration.ladder.worker"
START_LIMIT_S = 240.0  # to import, build, compile and try choices, on a slow machine
END_LIMIT_S = 120.0  # after a run's time, for the labelled images
Say = Callable[[str], None]


def command(task_file: Path, result_file: Path) -> list[str]:
    """Return the command of a rung's process; -P keeps the working folder off its module path."""
    return [sys.executable, "-P", "-m", WORKER, str(task_file), str(result_file)]


def run_task(
    store: Store,
    name: str,
    task: RungTask,
    say: Say = lambda _: None,
    *,
    make_command: Callable[[Path, Path], Sequence[str]] = command,
    start_limit_s: float = START_LIMIT_S,
) -> RungResult:
    """Run a task in a new process; a crash or a timeout becomes the result.

    Args:
        store: the ladder's work folder.
        name: of the result.
        task: for the process.
        say: called with each event of the process.
        make_command: returns the command for a task file and a result file.
        start_limit_s: the limit until the first measurement.

    """
    task_file, result_file, log = store.task_files(name)
    write_result(task_file, task.model_dump_json())
    result_file.unlink(missing_ok=True)
    power = PackagePower()
    watts: float | None = None
    is_measuring = False
    line = make_command(task_file, result_file)
    with log.open("wb") as printed, child(line, printed, is_heard=True) as process:
        deadline = time.monotonic() + start_limit_s
        while (said := process.read_line(deadline)) is not None:
            if (event := _event(said)) is None:
                continue
            if event == "measuring":
                power.watts()
                is_measuring = True
                deadline = time.monotonic() + 3 * task.seconds + END_LIMIT_S
            elif event == "measured":
                watts = power.total_watts()
            say(event)
        is_late = time.monotonic() >= deadline
    if is_late and not result_file.exists():  # for example a network too large for so few cores
        if is_measuring:
            return _failed("it did not end long after its time: given up")
        reason = f"it was not ready to run within {start_limit_s:g} s: given up"
        return RungResult(outcome="skipped", reason=reason)
    try:
        result = read_result(result_file)
    except RungError:
        return _failed(f"its process died ({process.how_ended()}): {last_words(log)}")
    if result.figures is None:
        return result
    figures = result.figures.model_copy(update={"watts": watts})
    return result.model_copy(update={"figures": figures})


@contextlib.contextmanager
def child(
    line: Sequence[str],
    printed: IO[bytes],
    *,
    is_heard: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Run a process of the ladder during the block; ``printed`` is its log.

    Raises:
        LadderError: the process could not be started.

    """
    try:
        started = Child(line, printed, is_heard=is_heard, environment=environment)
    except OSError as error:
        raise LadderError(f"{line[0]} could not be started: {error}; is memory left?") from error
    with started:
        yield started


def _event(line: bytes) -> str | None:
    """Return the event in a line of the process's output; None if the line has no event."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(line)["event"])
    return None


def _failed(reason: str) -> RungResult:
    return RungResult(outcome="failed", reason=reason)
