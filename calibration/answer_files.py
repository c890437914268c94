"""Files of answers, a row per image: JSON lines, or a folder of Parquet files, also in a store.

A stopped run can be continued: images that have rows are not computed again, if the same networks
answered them. Only whole lines and whole Parquet files count.
"""

import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, Self

from models.errors import ModelSetError
from models.files import make_folder, open_ours
from models.image_files import first_not_utf8, is_store, opened_store
from models.machine import needs_extra
from models.manifest import Manifest

Row = dict[str, Any]  # {"file": str, "folder": str, "bytes": int, "modified_ns": int, **answer}
Stamp = tuple[int, int] | None  # bytes and time of change (ns) of a file; None: not known
Options = dict[str, Any]  # of the run, which the answers depend on
ROWS_A_PART = 4096
ROWS_WITH_EMBEDDING = 512  # of 2,048 numbers they take 30 MB
ROW_BEGINS = b'{"file": '  # in JSON lines
# In the metadata of a Parquet file.
VERSION_KEY, OPTIONS_KEY = b"tandem.model_version", b"tandem.options"
KEPT = ["file", "folder", "bytes", "modified_ns", "error"]  # columns that say what has answers
PART = re.compile(r"part-\d{6,}\.parquet")


class AnswerFile:
    """A file of rows; this base class keeps none.

    Attributes:
        done: the files that have rows from earlier runs, by :func:`key_of`, with their stamps.
        failed: those of them whose row is an error.
    """

    def __init__(self) -> None:
        self.done, self.failed = dict[str, Stamp](), set[str]()

    def _note(self, row: Row) -> None:
        has_stamp = row.get("bytes") is not None
        self.done[key := key_of(row)] = (row["bytes"], row["modified_ns"]) if has_stamp else None
        self.failed.discard(key)
        if row.get("error") is not None:
            self.failed.add(key)

    def remove(self, keys: Collection[str]) -> None:
        """Remove the rows of files that have changed."""
        for key in keys:
            self.done.pop(key, None)
            self.failed.discard(key)

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


def key_of(row: Row) -> str:
    """Return which file a row is of: its folder and the name in it."""
    folder = row.get("folder")
    return f"{folder.rstrip('/')}/{row['file']}" if folder else str(row["file"])


def opened(place: str | Path, model_version: str, options: Options | None = None) -> AnswerFile:
    """Open or make the file or folder, by its suffix; a URL stands for a folder.

    Raises :class:`ModelSetError` if the suffix is unknown, it has answers of other networks or
    options, another run writes there, or it may not be written.
    """
    options = options or {}
    out, suffix = str(place), Path(place).suffix
    if not is_store(out) and suffix not in (".jsonl", ".parquet"):
        raise ModelSetError(f"--out {out}: end it in .jsonl (JSON lines) or .parquet")
    try:
        if is_store(out):
            return ParquetParts(out, model_version, options)
        return (JsonLines if suffix == ".jsonl" else LocalParts)(out, model_version, options)
    except OSError as error:
        reason = error.strerror or error
        raise ModelSetError(f"--out {out}: {reason}; name another place") from error


class JsonLines(AnswerFile):
    """A file with a JSON object per line."""

    def __init__(self, out: str, model_version: str, options: Options) -> None:
        super().__init__()
        self._path, self._options = Path(out), options
        self._file = self._path.open("a+b")
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
            _check_options(row.get("options", self._options), self._options, path)
            self._note(row)
            whole += len(line)
        self._file.truncate(whole)
        self._file.write(ending)

    def remove(self, keys: Collection[str]) -> None:
        super().remove(keys)
        path, mode = self._path.resolve(), stat.S_IMODE(os.fstat(self._file.fileno()).st_mode)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        with _kept(str(self._path)), ExitStack() as undo:
            left = os.fdopen(open_ours(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "w+b")
            undo.callback(partial.unlink, missing_ok=True)
            undo.callback(left.close)
            _lock(left.fileno(), str(self._path))
            self._file.seek(0)
            left.writelines(line for line in self._file if key_of(json.loads(line)) not in keys)
            left.flush()
            partial.replace(path)
            undo.pop_all()
            self._file.close()
            self._file = left

    def add(self, row: Row) -> None:
        with _kept(str(self._path)):
            self._file.write(json.dumps(row | {"options": self._options}).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        with _kept(str(self._path)):
            self._file.close()


class ParquetParts(AnswerFile):
    """A folder of Parquet files of up to 4,096 rows: a dataset for pandas, Spark and Ray.

    This is for stores, in which a file appears as a whole; no lock excludes a second run.
    """

    def __init__(self, out: str, model_version: str, options: Options) -> None:
        super().__init__()
        with needs_extra("parquet", f"classify --out {out}"):
            import pyarrow
            import pyarrow.fs
            import pyarrow.parquet
        self._arrow, self._parquet = pyarrow, pyarrow.parquet
        self._files, self._folder = self._opened(out)
        self._schema = _schema(pyarrow, model_version, options)
        self._rows = list[Row]()
        self._most = ROWS_WITH_EMBEDDING if options.get("embedding") else ROWS_A_PART
        self._files.create_dir(self._folder)  # fails now if the store is not writable
        held = self._files.get_file_info(pyarrow.fs.FileSelector(self._folder))
        names = sorted(info.base_name for info in held if PART.fullmatch(info.base_name))
        self._parts = [f"{self._folder}/{name}" for name in names]
        for part in self._parts:
            schema = self._parquet.read_schema(part, filesystem=self._files)
            has = schema.metadata or {}
            _check_version(has.get(VERSION_KEY, b"").decode(), model_version, part)
            _check_options(json.loads(has.get(OPTIONS_KEY, b"{}")), options, part)
            kept = self._parquet.read_table(part, columns=KEPT, filesystem=self._files)
            for row in kept.to_pylist():
                self._note(row)
        self._next = int(names[-1][5:-8]) + 1 if names else 0

    def _opened(self, out: str) -> tuple[Any, str]:
        return opened_store(out)

    def check_names(self, files: Iterable[str]) -> None:
        if (name := first_not_utf8(files)) is not None:
            raise ModelSetError(
                f"the name {name!r} is not UTF-8, as text in Parquet is; rename the file, or write "
                "--out FILE.jsonl"
            )

    def remove(self, keys: Collection[str]) -> None:
        super().remove(keys)
        for part in self._parts:
            table = self._parquet.read_table(part, filesystem=self._files)
            left = [key_of(row) not in keys for row in table.select(KEPT).to_pylist()]
            if not all(left):
                with _kept(part):
                    self._put(table.filter(self._arrow.array(left)), part)

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) == self._most:
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

    def __init__(self, out: str, model_version: str, options: Options) -> None:
        make_folder(out)
        self._held = os.open(out, os.O_RDONLY)
        try:
            _lock(self._held, out)
            super().__init__(out, model_version, options)
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

    def stamps(self, files: Sequence[str]) -> list[tuple[int, int] | None]:
        """Return the bytes and time of change of each file; see ``file_stamps``."""
        ...


class OfflineRun:
    """Stores the rows of files, skipping files that have one; a context manager.

    ``out`` is a file, folder or store's URL for the rows, also of earlier runs; None: rows are not
    stored. A stored row names its file relative to the folder of ``paths`` that it was found in. It
    has the file's bytes and time of change: a file that was replaced is classified again.
    ``options`` are those that answers depend on. Raises :class:`ModelSetError` if ``out`` is not
    writable, or has answers of other networks or options.
    """

    def __init__(
        self, source: Rows, out: str | None, paths: Sequence[str], options: dict[str, Any]
    ) -> None:
        self._source = source  # below: as the files' names begin; "." stands in none of them
        self._folders = [p.rstrip("/") if is_store(p) else str(Path(p)) for p in paths]
        self._out = AnswerFile() if out is None else opened(out, source.model_version, options)
        self._is_kept = out is not None
        self._places: dict[str, Row] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()

    def left(self, files: list[str]) -> list[str]:
        """Return the files without a row from earlier runs, and those that changed since.

        Raises :class:`ModelSetError` if the row of one could not be stored.
        """
        if not self._is_kept:
            return files
        left, done = dict[str, str](), self._out.done
        for file, stamp in zip(files, self._source.stamps(files), strict=True):
            self._places[file] = place = self._placed(file)
            if stamp is not None:
                place |= {"bytes": stamp[0], "modified_ns": stamp[1]}
            if (key := key_of(place)) not in done or (stamp and done[key] not in (None, stamp)):
                left.setdefault(key, file)
        self._out.check_names(left.values())
        if stale := left.keys() & done.keys():
            self._out.remove(stale)
        return list(left.values())

    def _placed(self, file: str) -> Row:
        """Return the folder in which a file was asked for, and its name in it."""
        of = (folder for folder in self._folders if file.startswith(f"{folder}/"))
        is_here = "." in self._folders and not file.startswith(("/", "../")) and not is_store(file)
        folder = next(of, "" if is_here else file.rpartition("/")[0])
        name = file[len(folder) + 1 :] if folder else file
        return {"file": name, "folder": folder if is_store(file) else os.path.realpath(folder)}

    def num_failed_before(self, files: list[str]) -> int:
        """Return how many of the files have an error in a row of an earlier run."""
        return len(self._out.failed.intersection(key_of(self._places[file]) for file in files))

    def rows(self, files: list[str], top_k: int, threshold: float | None) -> Iterator[Row]:
        """Yield a row per file, after storing it."""
        for row in self._source.rows(files, top_k, threshold):
            self._out.add(row | self._places.get(row["file"], {}))
            yield row


def _schema(pyarrow: Any, model_version: str, options: Options) -> Any:
    text, number, flag = pyarrow.string(), pyarrow.float32(), pyarrow.bool_()
    fields = [("index", pyarrow.int32()), ("label", text), ("probability", number)]
    predictions = pyarrow.list_(pyarrow.struct(fields))
    columns = [
        *(("file", text), ("folder", text)),
        *(("bytes", pyarrow.int64()), ("modified_ns", pyarrow.int64())),
        *(("label", text), ("probability", number)),  # null without a prediction
        *(("sure", flag), ("agreement", flag), ("predictions", predictions)),
        *(("members", pyarrow.map_(text, predictions)), ("error", text)),
    ]
    if options.get("embedding"):
        columns.append(("embedding", pyarrow.list_(number)))
    said = {VERSION_KEY: model_version.encode(), OPTIONS_KEY: json.dumps(options).encode()}
    return pyarrow.schema(columns, metadata=said)


def _columns(row: Row) -> Row:
    first: Row = next(iter(row.get("predictions", ())), {})
    members = [(name, said["predictions"]) for name, said in row.get("members", {}).items()]
    return {
        **{name: row.get(name) for name in KEPT},
        "label": first.get("label"),
        "probability": first.get("probability"),
        "sure": row.get("sure"),
        "agreement": row.get("agreement"),
        "predictions": row.get("predictions"),
        "members": members,
        "embedding": row.get("embedding"),
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


def _check_options(has: Options, wanted: Options, path: str) -> None:
    for name, value in wanted.items():
        if has.get(name) != value:
            raise ModelSetError(
                f"--out {path} has answers with {name} {has.get(name)}, this run has {value}; name "
                "another place, or remove it"
            )


def _lock(descriptor: int, path: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ModelSetError(f"--out {path}: another run is writing there; wait for it") from None
