"""Converts a PyTorch file in a child process: its crash, or its delay, is an error of one line.

The file is loaded there and nowhere else, and never by a service. The child has a session of its
own, so that whatever it started ends with it.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from calibration.sets.batch import TensorLayout
from calibration.sets.pytorch.files import INSTEAD, Kind, check_trusted, kind_of
from models.errors import ModelSetError
from models.extras import check_installed
from models.record import SUFFIXES, Record, RuntimeName

CHILD = "calibration.sets.pytorch.child"
LIMIT_S = 900.0  # the largest networks convert in two minutes, on a slow machine in ten
EXTRA = "torch"


class ConversionTask(Record):
    """What the child is to do."""

    path: Path
    kind: Kind
    made: Path  # the IR (.xml) or ONNX file to write
    input_size: int | None
    layout: TensorLayout | None


class ConversionResult(Record):
    """How it went."""

    error: str | None = None


def command(task_file: Path, result_file: Path) -> list[str]:
    """Return the child's command; -P: the current folder holds none of its modules."""
    return [sys.executable, "-P", "-m", CHILD, str(task_file), str(result_file)]


@contextmanager
def converted(
    path: Path,
    runtime: RuntimeName,
    input_size: int | None,
    layout: TensorLayout | None,
    *,
    is_trusted: bool,
    limit_s: float = LIMIT_S,
) -> Iterator[Path]:
    """Convert a PyTorch file to the file of ``runtime``; it is there while the block lasts.

    Raises:
        MissingExtraError: torch is not installed.
        ModelSetError: the file is no network, not trusted, or cannot be converted.

    """
    kind = kind_of(path)
    check_trusted(path, is_trusted=is_trusted)
    check_installed("torch", EXTRA, f"models add of {path.name}")
    with tempfile.TemporaryDirectory(prefix="tandem-add-") as name:
        folder = Path(name)
        made = folder / f"network{SUFFIXES[runtime]}"
        task = ConversionTask(
            path=path.absolute(), kind=kind, made=made, input_size=input_size, layout=layout
        )
        task_file, result_file = folder / "task.json", folder / "result.json"
        task_file.write_text(task.model_dump_json(), "utf-8")
        code = _run(command(task_file, result_file), folder / "log", path, limit_s)
        _check(path, code, result_file, folder / "log")
        yield made


def _run(line: Sequence[str], log: Path, path: Path, limit_s: float) -> int:
    """Return the child's exit status; Ctrl-C and delay end it, with all that it started."""
    with log.open("wb") as printed:
        process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=printed, stderr=printed, start_new_session=True
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise ModelSetError(
            f"{path} was not converted within {limit_s:g} s, and was given up. {INSTEAD}"
        ) from None
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _check(path: Path, code: int, result_file: Path, log: Path) -> None:
    """Raise :class:`ModelSetError` unless the child has said that all went well."""
    try:
        result = ConversionResult.model_validate_json(result_file.read_bytes())
    except (OSError, ValidationError):
        raise ModelSetError(
            f"{path}: the process that loaded it died ({_how(code)}; {_last_line(log)}): the file "
            f"is damaged, or of another PyTorch. {INSTEAD}"
        ) from None
    if result.error is not None:
        raise ModelSetError(result.error)


def _how(code: int) -> str:
    if code == -signal.SIGKILL:
        return "SIGKILL: memory ran out, most likely"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _last_line(log: Path) -> str:
    """Return the last line that says something, so that none of it moves the terminal's cursor."""
    lines = log.read_bytes()[-4096:].decode("utf-8", "replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return "".join(character for character in last if character.isprintable())[:200]
