"""Renders a trace as JSON for Jaeger's page ("JSON File"), as Jaeger's API returns it."""

import json
from typing import Any

from app.tracing.stored.traces import StoredSpan, Trace

KINDS = {bool: "bool", int: "int64", float: "float64"}


def as_jaeger(trace: Trace) -> dict[str, Any]:
    """Return the request's trace, and the trace of each batch that its images were in."""
    return {"data": [_trace(trace.spans), *(_trace([batch]) for batch in trace.batches)]}


def _trace(spans: list[StoredSpan]) -> dict[str, Any]:
    places: dict[str, str] = {}  # by resource, as JSON: its values may be lists
    rows = []
    for span in spans:
        place = json.dumps(span["resource"], sort_keys=True)
        rows.append(_span(span, places.setdefault(place, f"p{len(places) + 1}")))
    processes = {
        name: {
            "serviceName": resource.get("service.name", "tandem"),
            "tags": [_tag(key, value) for key, value in resource.items() if key != "service.name"],
        }
        for resource, name in ((json.loads(place), name) for place, name in places.items())
    }
    return {"traceID": spans[0]["trace_id"], "spans": rows, "processes": processes}


def _span(span: StoredSpan, process: str) -> dict[str, Any]:
    above = []
    if span["parent_id"]:
        above.append(_reference("CHILD_OF", span["trace_id"], span["parent_id"]))
    links = [_reference("FOLLOWS_FROM", li["trace_id"], li["span_id"]) for li in span["links"]]
    tags = [_tag(key, value) for key, value in span["attributes"].items()]
    tags.append(_tag("span.kind", span["kind"].lower()))
    if span["error"] is not None:
        tags += [_tag("error", True), _tag("otel.status_description", span["error"])]
    return {
        "traceID": span["trace_id"],
        "spanID": span["span_id"],
        "operationName": span["name"],
        "references": above + links,
        "startTime": span["start_ns"] // 1000,  # us
        "duration": (span["end_ns"] - span["start_ns"]) // 1000,
        "tags": tags,
        "logs": [],
        "processID": process,
    }


def _reference(kind: str, trace_id: str, span_id: str) -> dict[str, str]:
    return {"refType": kind, "traceID": trace_id, "spanID": span_id}


def _tag(key: str, value: Any) -> dict[str, Any]:
    kind = KINDS.get(type(value), "string")
    return {"key": key, "type": kind, "value": value if kind != "string" else str(value)}
