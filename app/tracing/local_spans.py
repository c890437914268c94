"""Keeps spans in files on this machine, one JSON object a line, within a size limit.

Every process writes a file of its own and begins a new one now and then, so nothing is shared and
nothing is rewritten.
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import format_span_id, format_trace_id

MIB = 2**20
_encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one each time
FILES = 8  # that the folder's bound is divided into, for one process


class LocalSpans(SpanExporter):
    """Appends spans to files in ``folder``, ``max_mib`` of them in all, whoever wrote them."""

    def __init__(self, folder: Path, max_mib: int) -> None:
        self._folder, self._max_bytes = folder, max_mib * MIB
        self._file: Path | None = None
        self._num_bytes = 0
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append; a full disk is the sink's to tell."""
        text = "".join(line_of(span) + "\n" for span in spans)
        with self._lock:
            if self._file is None or self._num_bytes > self._max_bytes // FILES:
                self._begin_file()
                text = _encode({"resource": dict(spans[0].resource.attributes)}) + "\n" + text
            with self._file.open("a", encoding="utf-8") as file:  # type: ignore[union-attr]
                file.write(text)
            self._num_bytes += len(text)
        return SpanExportResult.SUCCESS

    def _begin_file(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        files = sorted(self._folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in files) + self._max_bytes // FILES
        while files and total > self._max_bytes:
            oldest = files.pop(0)
            total -= oldest.stat().st_size
            oldest.unlink(missing_ok=True)
        self._file = self._folder / f"{time.time_ns() // 10**6}-{os.getpid()}.jsonl"
        self._num_bytes = 0

    def shutdown(self) -> None:
        """Nothing is open between exports."""


def line_of(span: ReadableSpan) -> str:
    """Return a span as one line of JSON; times are ns since 1970, identities hexadecimal.

    The process's resource is the same for all: it is in the file's first line.
    """
    assert span.context is not None
    return _encode(
        {
            "trace_id": format_trace_id(span.context.trace_id),
            "span_id": format_span_id(span.context.span_id),
            "parent_id": format_span_id(span.parent.span_id) if span.parent else None,
            "name": span.name,
            "kind": span.kind.name,
            "start_ns": span.start_time,
            "end_ns": span.end_time,
            "attributes": dict(span.attributes or {}),
            "links": [
                {
                    "trace_id": format_trace_id(link.context.trace_id),
                    "span_id": format_span_id(link.context.span_id),
                }
                for link in span.links
            ],
            "error": span.status.description or "" if not span.status.is_ok else None,
        }
    )


def read_spans(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the spans of a folder, the newest file first; half-written lines are left out."""
    files = [path for path in folder.glob("*.jsonl") if path.is_file()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        resource: dict[str, Any] = {}
        for line in path.read_text("utf-8", "replace").splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and "trace_id" in found:
                yield {"resource": resource} | found
            elif isinstance(found, dict):
                resource = found.get("resource", {})
