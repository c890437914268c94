"""Starts the process of a rung, follows what it says, and ends it."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from app.errors import ConfigError
from app.ladder.store import Store, write_whole
from app.metrics.rapl import PackagePower
from models.rung import RungError, RungResult, RungTask, read_result

WORKER = "calibration.ladder.worker"
START_LIMIT_S = 240.0  # to import, build, compile and try choices, on a slow machine
END_LIMIT_S = 120.0  # beyond a run's time: the labelled images
END_S = 1.0  # for a process that has said all to end
Say = Callable[[str], None]


def command(task_file: Path, result_file: Path) -> list[str]:
    """Return the command of a rung's process; -P: the current folder holds none of its modules."""
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
    """Run one task in a process of its own; its death or delay is a result too.

    Whatever ends this call, Ctrl-C too, ends the process and all that it started.
    """
    task_file, result_file, log = store.task_files(name)
    write_whole(task_file, task.model_dump_json())
    result_file.unlink(missing_ok=True)
    power = PackagePower()
    watts: float | None = None
    is_measuring = False
    line = make_command(task_file, result_file)
    with log.open("wb") as printed, child(line, printed) as process:
        deadline = time.monotonic() + start_limit_s
        while (event := _next_event(process, deadline)) is not None:
            if event == "measuring":
                power.watts()
                is_measuring = True
                deadline = time.monotonic() + 3 * task.seconds + END_LIMIT_S
            elif event == "measured":
                watts = sum(power.watts().values()) or None
            say(event)
        is_late = time.monotonic() >= deadline
    if is_late and not result_file.exists():
        return _too_slow(is_measuring=is_measuring, start_limit_s=start_limit_s)
    try:
        result = read_result(result_file)
    except RungError:
        return _failed(f"its process died ({_how(process.returncode)}): {last_line(log)}")
    if result.figures is not None and watts is not None:
        figures = result.figures.model_copy(update={"watts": round(watts, 2)})
        result = result.model_copy(update={"figures": figures})
    return result


@contextmanager
def child(line: Sequence[str], printed: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a session of its own: Ctrl-C is ours, its stdin ends with this process.

    At the block's end it has a moment to end by itself; then, and at once after an error or Ctrl-C,
    it is killed with all that it started.

    Raises:
        ConfigError: it could not be started.

    """
    try:
        process = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(
            f"a rung's process could not be started: {error}; is memory left?"
        ) from error
    try:
        yield process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _next_event(process: subprocess.Popen[bytes], deadline: float) -> str | None:
    """Return what the process says next; None when it has ended, or the deadline has passed."""
    assert process.stdout is not None  # a pipe, above
    pipe, line = process.stdout.fileno(), b""
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([pipe], [], [], min(left_s, 0.5))[0]:
            continue
        byte = os.read(pipe, 1)
        if not byte:
            return None
        if byte == b"\n":
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return str(json.loads(line)["event"])
            line = b""
        else:
            line += byte
    return None


def last_line(log: Path) -> str:
    """Return the last line that says something."""
    try:
        lines = log.read_text("utf-8", "replace").splitlines()
    except OSError:
        return "it said nothing"
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _how(code: int) -> str:
    if code == -signal.SIGKILL:
        return "signal 9: memory ran out, most likely"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _too_slow(*, is_measuring: bool, start_limit_s: float) -> RungResult:
    """Return the result of a process that was given up: a network too large for so few cores."""
    if is_measuring:
        return _failed("it did not end long after its time: given up")
    reason = f"it was not ready to run within {start_limit_s:g} s: given up"
    return RungResult(outcome="skipped", reason=reason)


def _failed(reason: str) -> RungResult:
    return RungResult(outcome="failed", reason=reason)
