"""Keeps spans in files on this machine, a JSON object per line, within a size limit.

Every process writes its own files and starts a new one now and then, so no file is shared or
rewritten.
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, format_span_id, format_trace_id

from app.environment import MIB

FILES = 8  # of a process, which share the folder's size limit


class LocalSpans(SpanExporter):
    """Appends spans to files in ``folder``, at most ``max_mib`` of all processes together."""

    def __init__(self, folder: Path, max_mib: int) -> None:
        self._folder, self._max_bytes = folder, max_mib * MIB
        self._path: Path | None = None
        self._num_bytes = 0
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append spans; errors such as a full disk are handled by the sink."""
        text = b"".join(line_of(span) + b"\n" for span in spans)
        with self._lock:
            path, is_full = self._path, self._num_bytes > self._max_bytes // FILES
            if path is None or is_full or not path.exists():  # another process may make room
                path = self._path = self._new_file()
            if not self._num_bytes:  # also after a first write that failed
                resource = {"resource": dict(spans[0].resource.attributes)}
                text = orjson.dumps(resource) + b"\n" + text
            with path.open("ab" if self._num_bytes else "wb") as file:
                file.write(text)
            self._num_bytes += len(text)
        return SpanExportResult.SUCCESS

    def _new_file(self) -> Path:
        """Make room for another file in the folder, and return its path."""
        self._folder.mkdir(parents=True, exist_ok=True)
        files = sorted(self._folder.glob("*.jsonl"), key=_modified_at)
        total = sum(map(_num_bytes, files)) + self._max_bytes // FILES
        while files and total > self._max_bytes:
            oldest = files.pop(0)
            total -= _num_bytes(oldest)
            oldest.unlink(missing_ok=True)
        self._num_bytes = 0
        return self._folder / f"{time.time_ns() // 10**6}-{os.getpid()}.jsonl"

    def shutdown(self) -> None:
        """Do nothing, since no file is open between exports."""


def line_of(span: ReadableSpan) -> bytes:
    """Return a span as a line of JSON; times are in ns since 1970.

    Ids are hexadecimal. The process's resource is only in the file's first line.
    """
    assert span.context is not None
    fields = {
        **_identity(span.context, span.parent),
        "name": span.name,
        "kind": span.kind.name,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "attributes": dict(span.attributes or {}),
        "links": [_link(link.context) for link in span.links],
        "error": span.status.description or "" if not span.status.is_ok else None,
    }
    return orjson.dumps(fields, option=orjson.OPT_NON_STR_KEYS)


def _identity(own: SpanContext, parent: SpanContext | None) -> dict[str, str | None]:
    return _link(own) | {"parent_id": format_span_id(parent.span_id) if parent else None}


def _link(context: SpanContext) -> dict[str, str | None]:
    return {
        "trace_id": format_trace_id(context.trace_id),
        "span_id": format_span_id(context.span_id),
    }


def read_spans(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the spans of a folder, the newest file first; half-written lines are left out."""
    for path in sorted(folder.glob("*.jsonl"), key=_modified_at, reverse=True):
        resource: dict[str, Any] = {}
        try:
            text = path.read_text("utf-8", "replace")
        except (FileNotFoundError, IsADirectoryError):  # the service removes old files meanwhile
            continue
        for line in text.split("\n"):  # splitlines would also cut at U+2028 and others
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "trace_id" in record:
                yield {"resource": resource} | record
            elif isinstance(record, dict):
                resource = record.get("resource", {})


def _modified_at(path: Path) -> float:
    """Return when a file was last written to; 0 if another process has removed it."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _num_bytes(path: Path) -> int:
    """Return a file's size; 0 if another process has removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
