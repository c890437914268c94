"""Reads recorded answers: samples of a service (``sample_dir``), or ``tandem classify``'s files."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import ModelSetError
from models.extras import needs_extra

DISAGREES = "disagrees"  # the key in samples on which versions of a set disagree
NO_LABEL = "(no label)"  # a multi-label answer without any label
VERSION_KEY = b"tandem.model_version"
Row = dict[str, Any]


@dataclass(frozen=True)
class Answers:
    """The answers of N images."""

    labels: tuple[str, ...]  # (N,), the first label of each answer
    confidence: npt.NDArray[np.float64]  # (N,), that label's probability
    agreement: npt.NDArray[np.bool_]  # (N,), whether all members agreed
    versions: dict[str, int]  # number of images by the version that answered
    first: datetime | None = None  # time of the first answer; None if no time is recorded
    last: datetime | None = None
    model_set: str | None = None  # None if no set is recorded

    @property
    def num(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "Answers":
        """Collect rows that have the fields of ``/v1/classify``; rows with an error are skipped."""
        labels, confidence, agreement = list[str](), list[float](), list[bool]()
        versions, times = Counter[str](), list[datetime]()
        for row in rows:
            if row.get("error") is not None:
                continue
            label, probability = _first(row)
            labels.append(label)
            confidence.append(probability)
            agreement.append(row["agreement"])
            versions[str(row.get("model_version") or "unknown")] += 1
            if (when := time_of(row)) is not None:
                times.append(when)
        return cls(
            tuple(labels),
            np.array(confidence, np.float64),
            np.array(agreement, np.bool_),
            dict(versions),
            min(times, default=None),
            max(times, default=None),
        )


def _first(row: Row) -> tuple[str, float]:
    """Return the label and probability of a row's first class."""
    first: Row = next(iter(row["predictions"] or ()), {"label": NO_LABEL, "probability": 0.0})
    label, probability = first["label"], first["probability"]
    if not isinstance(label, str):
        raise ValueError(f"label is {label!r}, not a string")
    if not isinstance(probability, int | float) or not 0 <= probability <= 1:
        raise ValueError(f"probability is {probability!r}, not a number from 0 to 1")
    return label, float(probability)


@dataclass(frozen=True)
class Wanted:
    """A filter of rows; None in a field admits every row."""

    model_set: str | None = None
    version: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def takes(self, row: Row) -> bool:
        """Whether a row passes; a row without a set, version or time passes the filter of it."""
        when = time_of(row)
        return (
            self.model_set in (None, row.get("model_set", self.model_set))
            and self.version in (None, row.get("model_version", self.version))
            and (self.since is None or when is None or when >= self.since)
            and (self.until is None or when is None or when < self.until)
        )


def time_of(row: Row) -> datetime | None:
    """Return when a row was answered, or None if the row has no time."""
    text = row.get("time")
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"time is {text!r}, not like 2026-11-26T08:00+00:00") from None


def read_answers(path: Path, wanted: Wanted) -> Answers:
    """Read the answers of a JSON Lines or Parquet file, or of a folder of samples.

    Raises:
        ModelSetError: it cannot be read as answers, or has answers of several model sets.

    """
    names, rows = set[str](), list[Row]()
    try:
        for row in _rows(path):
            if row.get("error") is None and wanted.takes(row):
                names |= {str(row["model_set"])} if "model_set" in row else set()
                rows.append(row)
        answers = replace(Answers.of(rows), model_set=next(iter(names), None))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelSetError(
            f"{path}: a row is not an answer of tandem: {error}; remove the row, or write the file "
            "again with tandem classify --offline"
        ) from error
    if len(names) > 1:
        raise ModelSetError(
            f"{path} has answers of {', '.join(sorted(names))}: choose one with --model-set"
        )
    return answers


def _rows(path: Path) -> Iterator[Row]:
    if not path.exists():
        raise ModelSetError(f"{path}: no such file or folder")
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        elif path.is_dir():
            yield from _samples(path)
        else:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    yield _parsed(line, f"{path}, line {number}")
    except OSError as error:
        raise ModelSetError(f"{path}: {error.strerror or error}") from error


def _samples(folder: Path) -> Iterator[Row]:
    """Yield the answers in a folder of samples, without those that are removed meanwhile."""
    paths = sorted(folder.rglob("*.json"))
    if not paths:
        raise ModelSetError(
            f"{folder} has no samples. If it is a folder of images, run tandem classify --offline "
            f"{folder} --out answers.jsonl, and give answers.jsonl"
        )
    for path in paths:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        row = _parsed(content, str(path))
        if DISAGREES not in row:  # those were chosen for what they are
            yield row


def _parsed(text: bytes, place: str) -> Row:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ModelSetError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict) or not ({"predictions", "error"} & row.keys()):
        raise ModelSetError(f"{place}: not an answer of tandem: it has no predictions")
    return row


def _parquet_rows(path: Path) -> Iterator[Row]:
    with needs_extra("parquet", "drift --reference FILE.parquet"):
        import pyarrow.parquet
    columns = ["predictions", "agreement", "error"]
    parts = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    for part in parts:
        try:
            table = pyarrow.parquet.read_table(part, columns=columns)
        except (ValueError, KeyError) as error:  # the base classes of Arrow's errors
            raise ModelSetError(f"{part}: not answers of tandem: {error}") from error
        version = (table.schema.metadata or {}).get(VERSION_KEY, b"unknown").decode()
        for row in table.to_pylist():
            yield {**row, "model_version": version}
