"""Converts a PyTorch file in a child process; a crash or timeout becomes a one-line error.

Only this child loads the file, never a service. Processes that the file starts end with it.
"""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from calibration.sets.files import INSTEAD, Kind, check_trusted, kind_of
from calibration.sets.input import TensorLayout
from models.child_process import ChildDiedError, last_words, run_apart
from models.errors import ModelSetError
from models.machine import check_installed
from models.record import SUFFIXES, RuntimeName

LIMIT_S = 900.0  # the largest networks convert in two minutes, on a slow machine in ten
EXTRA = "torch"


@dataclass(frozen=True)
class ConversionTask:
    """The task of the child process."""

    path: Path
    kind: Kind
    made: Path  # the IR (.xml) or ONNX file to write
    input_size: int | None
    layout: TensorLayout | None


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
        made = Path(name) / f"network{SUFFIXES[runtime]}"
        task = ConversionTask(path.absolute(), kind, made, input_size, layout)
        log = Path(name) / "log"
        try:
            with log.open("wb") as printed:
                run_apart(convert_here, task, limit_s=limit_s, printed=printed)
        except TimeoutError:
            raise ModelSetError(
                f"{path} was not converted within {limit_s:g} s, and was given up. {INSTEAD}"
            ) from None
        except ChildDiedError as error:
            raise ModelSetError(
                f"{path}: the process that loaded it died ({error}; {last_words(log)}): the file "
                f"is damaged, or of another PyTorch. {INSTEAD}"
            ) from None
        yield made


def convert_here(task: ConversionTask) -> None:
    """Convert in this process, which runs code of the file; see :func:`child.convert`."""
    warnings.simplefilter("ignore")  # torch.jit is deprecated
    from calibration.sets.pytorch_child import convert

    convert(task)
