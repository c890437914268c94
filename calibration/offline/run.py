"""``tandem classify --offline``: computes the rows of many files, and stores them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from calibration.offline.answer_files import AnswerFile, Row, opened
from calibration.offline.local_ensemble import Answer, LocalEnsemble
from models.errors import ImageError
from models.manifest import Manifest
from models.model_set import load_model_set


class Rows(Protocol):
    """Classifies files: in this process, or on a cluster.

    Attributes:
        manifest: the set's.
        model_version: the networks' fingerprint.

    """

    manifest: Manifest
    model_version: str

    def rows(self, files: Sequence[str], top_k: int, threshold: float | None) -> Iterator[Row]:
        """Yield a row per file."""
        ...


class LocalRows:
    """Classifies files with a set's INT8 networks in this process.

    Args:
        name: of a model set, or its folder.
        num_threads: the number of cores; None: all.

    Raises:
        ModelSetError: there is no such set, or it may not answer here.

    """

    def __init__(self, name: str, num_threads: int | None = None) -> None:
        self._ensemble = LocalEnsemble(load_model_set(name), num_threads=num_threads)
        self.manifest = self._ensemble.model_set.manifest
        self.model_version = self._ensemble.model_version

    def rows(
        self,
        files: Sequence[str],
        top_k: int,
        threshold: float | None,
        contents: Sequence[bytes | OSError] | None = None,
    ) -> Iterator[Row]:
        """Yield a row per file, in order; ``contents``: the files' bytes, if read before."""
        read = list(map(Path, files)) if contents is None else contents
        answers = self._ensemble.classify_many(read, top_k, threshold)
        for file, answer in zip(files, answers, strict=True):
            yield {"file": file, **_fields(answer)}


class OfflineRun:
    """Stores the rows of files, skipping files that have one; a context manager.

    Args:
        source: classifies the files.
        out: a file, folder or store's URL for the rows, also of earlier runs; None: rows are not
            stored.

    Raises:
        ModelSetError: the place is not writable, or has other networks' answers.

    """

    def __init__(self, source: Rows, out: str | None) -> None:
        self._source = source
        self._out = AnswerFile() if out is None else opened(out, source.model_version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()

    def left(self, files: list[str]) -> list[str]:
        """Return the files without a row from earlier runs.

        Raises:
            ModelSetError: the row of one could not be stored.

        """
        left = [file for file in files if file not in self._out.done]
        self._out.check_names(left)
        return left

    def num_failed_before(self, files: list[str]) -> int:
        """Return how many of the files have an error in a row of an earlier run."""
        return len(self._out.failed.intersection(files))

    def rows(self, files: list[str], top_k: int, threshold: float | None) -> Iterator[Row]:
        """Yield a row per file, after storing it."""
        for row in self._source.rows(files, top_k, threshold):
            self._out.add(row)
            yield row


def _fields(answer: Answer | ImageError | OSError) -> dict[str, Any]:
    """Return an answer, or an error in the service's form."""
    if isinstance(answer, Answer):
        return answer.fields()
    code = answer.code if isinstance(answer, ImageError) else "unreadable"
    return {"error": {"code": code, "message": str(answer)}}
