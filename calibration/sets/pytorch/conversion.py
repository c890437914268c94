"""Converts a PyTorch file in a child process; a crash or timeout becomes a one-line error.

Only this child loads the file, never a service. It has its own session, so that all processes that
it starts end with it.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from calibration.sets.batch import TensorLayout
from calibration.sets.pytorch.files import INSTEAD, Kind, check_trusted, kind_of
from models.child_process import Child, last_words
from models.errors import ModelSetError
from models.extras import check_installed
from models.record import SUFFIXES, Record, RuntimeName

CHILD = "calibration.sets.pytorch.child"
LIMIT_S = 900.0  # the largest networks convert in two minutes, on a slow machine in ten
EXTRA = "torch"


class ConversionTask(Record):
    """The task of the child process."""

    path: Path
    kind: Kind
    made: Path  # the IR (.xml) or ONNX file to write
    input_size: int | None
    layout: TensorLayout | None


class ConversionResult(Record):
    """The result of the child process."""

    error: str | None = None


def command(task_file: Path, result_file: Path) -> list[str]:
    """Return the child's command; -P keeps the working folder off its module path."""
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
    """Convert a PyTorch file for ``runtime``; the file exists during the block.

    Raises:
        MissingExtraError: torch is not installed.
        ModelSetError: the file is not a network, not trusted, or cannot be converted.

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
        how = _run(command(task_file, result_file), folder / "log", path, limit_s)
        _check(path, how, result_file, folder / "log")
        yield made


def _run(line: Sequence[str], log: Path, path: Path, limit_s: float) -> str:
    """Run the child and return how it ended; on Ctrl-C or timeout, kill it and its processes."""
    with log.open("wb") as printed, Child(line, printed) as process:
        if not process.has_ended(limit_s):
            raise ModelSetError(
                f"{path} was not converted within {limit_s:g} s, and was given up. {INSTEAD}"
            )
        return process.how_ended()


def _check(path: Path, how: str, result_file: Path, log: Path) -> None:
    """Raise :class:`ModelSetError` unless the child reported success."""
    try:
        result = ConversionResult.model_validate_json(result_file.read_bytes())
    except (OSError, ValidationError):
        raise ModelSetError(
            f"{path}: the process that loaded it died ({how}; {last_words(log)}): the file "
            f"is damaged, or of another PyTorch. {INSTEAD}"
        ) from None
    if result.error is not None:
        raise ModelSetError(result.error)
