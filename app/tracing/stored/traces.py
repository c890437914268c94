"""Finds traces of requests among the spans stored on this machine."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.errors import ConfigError
from app.tracing.local_spans import read_spans

StoredSpan = dict[str, Any]  # in the form of app.tracing.local_spans.line_of


@dataclass
class Trace:
    """The spans of a request, and the batches that its images were in."""

    root: StoredSpan
    spans: list[StoredSpan]  # by their start, with the root
    batches: list[StoredSpan] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return str(self.root["attributes"].get("request_id", ""))

    @property
    def status(self) -> int | str | None:
        """The HTTP status or gRPC status name of its answer; None without an answer."""
        facts = self.root["attributes"]
        code: int | str | None = facts.get("http.response.status_code")
        return code or facts.get("rpc.response.status_code")

    @property
    def duration_ms(self) -> float:
        return float(self.root["end_ns"] - self.root["start_ns"]) / 1e6


def find_trace(folder: Path, identity: str) -> Trace:
    """Return the trace of a request by its X-Request-ID or its trace id.

    Raises:
        ConfigError: no stored trace has this id.

    """
    for trace in _traces(folder):
        if identity in (trace.request_id, trace.root["trace_id"]):
            return trace
    raise ConfigError(
        f"no trace of request {identity!r} in {folder}: it was not sampled, is too old, or was "
        "kept on another machine; tandem trace lists the traces that are kept"
    )


def latest_traces(folder: Path, number: int) -> list[Trace]:
    """Return the traces of the last requests, the newest first."""
    return sorted(_traces(folder), key=lambda trace: -trace.root["start_ns"])[:number]


def _traces(folder: Path) -> list[Trace]:
    by_trace: dict[str, list[StoredSpan]] = defaultdict(list)
    batches: dict[tuple[str, str], StoredSpan] = {}
    for span in read_spans(folder):
        if span["name"] == "batch":
            batches[span["trace_id"], span["span_id"]] = span
        else:
            by_trace[span["trace_id"]].append(span)
    traces = []
    for spans in by_trace.values():
        spans.sort(key=_by_start)
        if (root := _root_of(spans)) is None:
            continue
        links = {
            (link["trace_id"], link["span_id"]): None for span in spans for link in span["links"]
        }
        linked = [batches[link] for link in links if link in batches]
        traces.append(Trace(root, spans, linked))
    return traces


def _by_start(span: StoredSpan) -> tuple[int, int]:
    """Sort by start; a request's images, which start within microseconds, by index."""
    return span["start_ns"] // 100_000, span["attributes"].get("tandem.image", 0)


def _root_of(spans: list[StoredSpan]) -> StoredSpan | None:
    """Return the request's own span; its parent may be a client's span in another place."""
    own = {span["span_id"] for span in spans}
    roots = [s for s in spans if s["parent_id"] not in own and "request_id" in s["attributes"]]
    return roots[0] if roots else None
