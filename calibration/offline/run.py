"""``tandem classify --offline``: the rows of many files, and where they are kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from calibration.offline.answer_files import AnswerFile, Row, opened
from calibration.offline.local_ensemble import Answer, load
from models.errors import ImageError
from models.manifest import Manifest


class OfflineRun:
    """Classifies files with a set's INT8 networks in this process; a context manager.

    Args:
        name: of a model set, or its folder.
        out: keeps the rows, and which files an earlier run answered; None: nothing is kept.

    Raises:
        ModelSetError: no such set, one that must not answer here, or nowhere to write.

    """

    def __init__(self, name: str, out: Path | None) -> None:
        self._ensemble = load(name)
        version = self._ensemble.model_version
        self._out: AnswerFile | None = None if out is None else opened(out, version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._out is not None:
            self._out.close()

    @property
    def manifest(self) -> Manifest:
        """The set's."""
        return self._ensemble.model_set.manifest

    def left(self, files: list[Path]) -> list[Path]:
        """Return the files that no earlier run answered."""
        done = set[str]() if self._out is None else self._out.done
        return [file for file in files if str(file) not in done]

    def rows(self, files: list[Path], top_k: int, threshold: float | None) -> Iterator[Row]:
        """Yield one row a file, in order, once it is kept."""
        answers = self._ensemble.classify_many(files, top_k, threshold)
        for file, answer in zip(files, answers, strict=True):
            row = {"file": str(file), **_fields(answer)}
            if self._out is not None:
                self._out.add(row)
            yield row


def _fields(answer: Answer | ImageError | OSError) -> dict[str, Any]:
    """Return an answer, or an error in the form of a service's."""
    if isinstance(answer, Answer):
        return answer.fields()
    code = answer.code if isinstance(answer, ImageError) else "unreadable"
    return {"error": {"code": code, "message": str(answer)}}
