"""Files of answers, one row an image: JSON lines, or a folder of Parquet files.

A run that was stopped goes on where it ended: what a file has already is not computed again, if the
same networks answered it. Only whole lines and whole Parquet files count.
"""

import fcntl
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from models.errors import ModelSetError
from models.extras import needs_extra

Row = dict[str, Any]  # {"file": str, **answer}
ROWS_A_PART = 4096
VERSION_KEY = b"tandem.model_version"


class AnswerFile(ABC):
    """Where rows go; a context manager that keeps what was added.

    Attributes:
        done: the files that earlier runs answered.

    """

    done: set[str]

    @abstractmethod
    def add(self, row: Row) -> None:
        """Keep a row."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def opened(path: Path, model_version: str) -> AnswerFile:
    """Open the file, or folder, by its suffix; make it if it is not there.

    Raises:
        ModelSetError: another suffix, other networks' answers, another run that writes there, or
            no permission.

    """
    makers: dict[str, Callable[[Path, str], AnswerFile]]
    makers = {".jsonl": JsonLines, ".parquet": ParquetParts}
    if path.suffix not in makers:
        raise ModelSetError(f"--out {path}: end it in .jsonl (JSON lines) or .parquet")
    try:
        return makers[path.suffix](path, model_version)
    except OSError as error:
        raise ModelSetError(f"--out {path}: {error.strerror}; name another place") from error


class JsonLines(AnswerFile):
    """One JSON object a line."""

    def __init__(self, path: Path, model_version: str) -> None:
        self.done = set[str]()
        self._file = path.open("a+b")
        try:
            _lock(self._file.fileno(), path)
            self._file.truncate(self._read(path, model_version))
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: Path, model_version: str) -> int:
        """Note which files have answers; return where the last whole line ends."""
        whole = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break  # the run was killed in the midst of it
            row = _parsed(line, path, number)
            _check_version(row.get("model_version", model_version), model_version, path)
            self.done.add(row["file"])
            whole += len(line)
        return whole

    def add(self, row: Row) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class ParquetParts(AnswerFile):
    """A folder of Parquet files, each of up to 4,096 rows: a dataset for pandas, Spark and Ray."""

    def __init__(self, path: Path, model_version: str) -> None:
        with needs_extra("parquet", "classify --out FOLDER.parquet"):
            import pyarrow
            import pyarrow.parquet
        self._arrow, self._parquet = pyarrow, pyarrow.parquet
        self._folder, self._rows = path, list[Row]()
        path.mkdir(parents=True, exist_ok=True)
        self._schema, self.done = _schema(pyarrow, model_version), set[str]()
        self._held = os.open(path, os.O_RDONLY)
        try:
            _lock(self._held, path)
            self._next = self._read(model_version)
        except BaseException:
            os.close(self._held)
            raise

    def _read(self, model_version: str) -> int:
        """Note which files have answers; return the next part's number."""
        parts = sorted(self._folder.glob("part-*.parquet"))
        for part in parts:
            held = self._parquet.read_table(part, columns=["file"])
            version = (held.schema.metadata or {}).get(VERSION_KEY, b"").decode()
            _check_version(version, model_version, part)
            self.done.update(held.column("file").to_pylist())
        return int(parts[-1].stem.partition("-")[2]) + 1 if parts else 0

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) == ROWS_A_PART:
            self._write()

    def close(self) -> None:
        try:
            if self._rows:
                self._write()
        finally:
            os.close(self._held)

    def _write(self) -> None:
        rows = [_columns(row) for row in self._rows]
        table = self._arrow.Table.from_pylist(rows, schema=self._schema)
        part = self._folder / f"part-{self._next:06}.parquet"
        partial = part.with_suffix(".partial")
        try:
            self._parquet.write_table(table, partial)
            partial.replace(part)
        finally:
            partial.unlink(missing_ok=True)
        self._next += 1
        self._rows.clear()


def _schema(pyarrow: Any, model_version: str) -> Any:
    prediction = pyarrow.struct(
        [
            ("index", pyarrow.int32()),
            ("label", pyarrow.string()),
            ("probability", pyarrow.float32()),
        ]
    )
    columns = [
        ("file", pyarrow.string()),
        ("label", pyarrow.string()),  # the first prediction's; null where there is none
        ("probability", pyarrow.float32()),
        ("sure", pyarrow.bool_()),
        ("agreement", pyarrow.bool_()),
        ("predictions", pyarrow.list_(prediction)),
        ("members", pyarrow.map_(pyarrow.string(), pyarrow.list_(prediction))),
        ("error", pyarrow.string()),
    ]
    return pyarrow.schema(columns, metadata={VERSION_KEY: model_version.encode()})


def _columns(row: Row) -> Row:
    """Return a row as the schema has it."""
    first: Row = next(iter(row.get("predictions", ())), {})
    members = [(name, said["predictions"]) for name, said in row.get("members", {}).items()]
    return {
        "file": row["file"],
        "label": first.get("label"),
        "probability": first.get("probability"),
        "sure": row.get("sure"),
        "agreement": row.get("agreement"),
        "predictions": row.get("predictions"),
        "members": members,
        "error": row["error"]["message"] if "error" in row else None,
    }


def _parsed(line: bytes, path: Path, number: int) -> Row:
    with suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("file"), str):
            return row
    raise ModelSetError(f"--out {path}: line {number} is no answer; name another file")


def _check_version(has: str, wanted: str, path: Path) -> None:
    if has != wanted:
        raise ModelSetError(
            f"--out {path} has answers of the model set's version {has}, this one is {wanted}; "
            "name another place, or remove it"
        )


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ModelSetError(f"--out {path}: another run is writing there; wait for it") from None
