"""Files of answers, a row per image: JSON lines, or a folder of Parquet files, also in a store.

A stopped run can be continued: images that have rows are not computed again, if the same networks
answered them. Only whole lines and whole Parquet files count.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from models.errors import ModelSetError
from models.image_files import first_not_utf8, is_store, opened_store
from models.machine import needs_extra

Row = dict[str, Any]  # {"file": str, **answer}
ROWS_A_PART = 4096
ROW_BEGINS = b'{"file": '  # in JSON lines
VERSION_KEY = b"tandem.model_version"  # in the metadata of a Parquet file
PART = re.compile(r"part-\d{6,}\.parquet")


class AnswerFile:
    """A file of rows; this base class keeps none.

    Attributes:
        done: the files that have rows from earlier runs.
        failed: those of them whose row is an error.

    """

    def __init__(self) -> None:
        self.done, self.failed = set[str](), set[str]()

    def check_names(self, files: Iterable[str]) -> None:
        """Raise :class:`ModelSetError` if the rows of these files could not be kept."""

    def add(self, row: Row) -> None:
        """Add a row."""

    def close(self) -> None:
        """Write the remaining rows."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def opened(place: str | Path, model_version: str) -> AnswerFile:
    """Open or make the file or folder, by its suffix; a URL stands for a folder.

    Raises:
        ModelSetError: an unknown suffix, other networks' answers, another run that writes there, or
            no permission.

    """
    out, suffix = str(place), Path(place).suffix
    if not is_store(out) and suffix not in (".jsonl", ".parquet"):
        raise ModelSetError(f"--out {out}: end it in .jsonl (JSON lines) or .parquet")
    try:
        if is_store(out):
            return ParquetParts(out, model_version)
        return (JsonLines if suffix == ".jsonl" else LocalParts)(out, model_version)
    except OSError as error:
        reason = error.strerror or error
        raise ModelSetError(f"--out {out}: {reason}; name another place") from error


class JsonLines(AnswerFile):
    """A file with a JSON object per line."""

    def __init__(self, out: str, model_version: str) -> None:
        super().__init__()
        path = Path(out)
        self._file = path.open("a+b")
        try:
            _lock(self._file.fileno(), out)
            self._read(out, model_version)
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: str, model_version: str) -> None:
        """Note which files have answers; cut off a part of a row at the end."""
        whole, ending = 0, b""
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                if line.startswith(ROW_BEGINS[: len(line)]):
                    break  # the run was killed while it wrote this line
                ending = b"\n"  # an editor or a filter wrote it
            row = _parsed(line, path, number)
            _check_version(row.get("model_version", model_version), model_version, path)
            self.done.add(row["file"])
            if "error" in row:
                self.failed.add(row["file"])
            whole += len(line)
        self._file.truncate(whole)
        self._file.write(ending)

    def add(self, row: Row) -> None:
        with _kept(str(self._file.name)):
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        with _kept(str(self._file.name)):
            self._file.close()


class ParquetParts(AnswerFile):
    """A folder of Parquet files of up to 4,096 rows: a dataset for pandas, Spark and Ray.

    This is for stores, in which a file appears as a whole; no lock excludes a second run.
    """

    def __init__(self, out: str, model_version: str) -> None:
        super().__init__()
        with needs_extra("parquet", f"classify --out {out}"):
            import pyarrow
            import pyarrow.fs
            import pyarrow.parquet
        self._arrow, self._parquet = pyarrow, pyarrow.parquet
        self._files, self._folder = self._opened(out)
        self._schema = _schema(pyarrow, model_version)
        self._rows = list[Row]()
        self._files.create_dir(self._folder)  # fails now if the store is not writable
        held = self._files.get_file_info(pyarrow.fs.FileSelector(self._folder))
        names = sorted(info.base_name for info in held if PART.fullmatch(info.base_name))
        for name in names:
            self._note(f"{self._folder}/{name}", model_version)
        self._next = int(names[-1][5:-8]) + 1 if names else 0

    def _opened(self, out: str) -> tuple[Any, str]:
        """Return the filesystem, and the folder's path in it."""
        return opened_store(out)

    def _note(self, part: str, model_version: str) -> None:
        """Note which files have answers."""
        columns = ["file", "error"]
        held = self._parquet.read_table(part, columns=columns, filesystem=self._files)
        version = (held.schema.metadata or {}).get(VERSION_KEY, b"").decode()
        _check_version(version, model_version, part)
        rows = held.to_pylist()
        self.done.update(row["file"] for row in rows)
        self.failed.update(row["file"] for row in rows if row["error"] is not None)

    def check_names(self, files: Iterable[str]) -> None:
        if (name := first_not_utf8(files)) is not None:
            raise ModelSetError(
                f"the name {name!r} is not UTF-8, as text in Parquet is; rename the file, or write "
                "--out FILE.jsonl"
            )

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) == ROWS_A_PART:
            self._write()

    def close(self) -> None:
        if self._rows:
            self._write()

    def _write(self) -> None:
        rows = [_columns(row) for row in self._rows]
        table = self._arrow.Table.from_pylist(rows, schema=self._schema)
        part = f"{self._folder}/part-{self._next:06}.parquet"
        with _kept(part):
            self._put(table, part)
        self._next += 1
        self._rows.clear()

    def _put(self, table: Any, part: str) -> None:
        self._parquet.write_table(table, part, filesystem=self._files)


class LocalParts(ParquetParts):
    """A folder of Parquet files on this machine, locked against other runs."""

    def __init__(self, out: str, model_version: str) -> None:
        Path(out).mkdir(parents=True, exist_ok=True)
        self._held = os.open(out, os.O_RDONLY)
        try:
            _lock(self._held, out)
            super().__init__(out, model_version)
        except BaseException:
            os.close(self._held)
            raise

    def _opened(self, out: str) -> tuple[Any, str]:
        return self._arrow.fs.LocalFileSystem(), out

    def close(self) -> None:
        try:
            super().close()
        finally:
            os.close(self._held)

    def _put(self, table: Any, part: str) -> None:
        partial = Path(part).with_suffix(".partial")
        try:
            super()._put(table, str(partial))
            partial.replace(part)
        finally:
            partial.unlink(missing_ok=True)


def _schema(pyarrow: Any, model_version: str) -> Any:
    text, number, flag = pyarrow.string(), pyarrow.float32(), pyarrow.bool_()
    fields = [("index", pyarrow.int32()), ("label", text), ("probability", number)]
    predictions = pyarrow.list_(pyarrow.struct(fields))
    columns = [
        *(("file", text), ("label", text), ("probability", number)),  # null without a prediction
        *(("sure", flag), ("agreement", flag), ("predictions", predictions)),
        *(("members", pyarrow.map_(text, predictions)), ("error", text)),
    ]
    return pyarrow.schema(columns, metadata={VERSION_KEY: model_version.encode()})


def _columns(row: Row) -> Row:
    """Return a row in the schema's form."""
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


@contextmanager
def _kept(place: str) -> Iterator[None]:
    """Turn an OSError of the block into a :class:`ModelSetError` that says how to go on."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ModelSetError(
            f"cannot write {place}: {reason}; put that right, and the same command goes on"
        ) from error


def _parsed(line: bytes, path: str, number: int) -> Row:
    with suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("file"), str):
            return row
    raise ModelSetError(f"--out {path}: line {number} is no answer; name another file")


def _check_version(has: str, wanted: str, path: str) -> None:
    if has != wanted:
        raise ModelSetError(
            f"--out {path} has answers of the model set's version {has}, this one is {wanted}; "
            "name another place, or remove it"
        )


def _lock(descriptor: int, path: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ModelSetError(f"--out {path}: another run is writing there; wait for it") from None
