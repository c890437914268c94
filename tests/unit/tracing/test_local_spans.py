"""Files of spans: what is written is read back, within a bound, on a full disk too."""

import json

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext

from app.tracing import local_spans
from app.tracing.local_spans import LocalSpans, line_of, read_spans
from app.tracing.parents import Parent, SpanPart, current_parent
from app.tracing.spans import RecordedSpan, RecordedTrace
from tests.support.full_disk import full_disk


def test_what_is_written_is_read_back(tmp_path, spans):
    assert LocalSpans(tmp_path / "new", 1).export(spans) is SpanExportResult.SUCCESS
    decode, infer, request = list(read_spans(tmp_path / "new"))
    assert (decode["name"], infer["name"], request["name"]) == ("decode", "infer", "request")
    assert decode["parent_id"] == infer["parent_id"] == request["span_id"]
    assert {s["trace_id"] for s in (decode, infer)} == {request["trace_id"]}
    assert request["parent_id"] is None
    assert request["attributes"] == {"request_id": "mine"}
    assert infer["end_ns"] - infer["start_ns"] == pytest.approx(17e6, abs=1000)
    assert infer["error"] is None
    assert infer["resource"]["host.name"] == "here"


def test_the_folder_stays_within_its_bound_and_keeps_the_newest(tmp_path, spans, monkeypatch):
    monkeypatch.setattr(local_spans, "MIB", 10_000)
    numbers = iter(range(10**6))
    monkeypatch.setattr(local_spans.time, "time_ns", lambda: next(numbers) * 10**6)
    one, two = LocalSpans(tmp_path, 1), LocalSpans(tmp_path, 1)
    (tmp_path / "yours.txt").write_text("x" * 20_000)
    for _ in range(60):
        one.export(spans)
        two.export(spans[:1])
        sizes = [path.stat().st_size for path in tmp_path.glob("*.jsonl")]
        assert sum(sizes) < 10_000 * 1.4  # two writers' open files may overlap the bound
    assert len(sizes) > 3
    assert (tmp_path / "yours.txt").exists()
    assert line_of(spans[-1]) in b"".join(p.read_bytes() for p in tmp_path.glob("*.jsonl"))


def test_garbage_and_half_a_line_are_left_out(tmp_path, spans):
    LocalSpans(tmp_path, 1).export(spans)
    (file,) = tmp_path.glob("*.jsonl")
    whole = file.read_bytes()
    file.write_bytes(b'\xff\xfe\n[1]\n{"a": 1}\n' + whole + whole[:40])
    assert len(list(read_spans(tmp_path))) == len(spans)


def test_a_full_disk_raises_which_the_sink_counts(tmp_path, spans):
    with full_disk(100), pytest.raises(OSError, match="large"):
        LocalSpans(tmp_path, 1).export(spans)


def test_a_folder_that_is_none_has_no_spans(tmp_path):
    assert list(read_spans(tmp_path / "missing")) == []


def test_a_line_is_one_line(spans):
    assert b"\n" not in line_of(spans[0])
    assert json.loads(line_of(spans[0]))["kind"] == "INTERNAL"


def test_a_recorded_span_is_the_same_line_as_what_the_sdk_makes_of_it(exported, request_span):
    parent = current_parent()
    plain = RecordedSpan(
        "decode", parent, parent.resource, (1.0, 2.0), {"tandem.bytes": 7}, (), None
    )
    links = (request_span.get_span_context(),)
    batch = RecordedSpan("batch", None, parent.resource, (1.0, 2.0), {}, links, "out of memory")
    for span in (plain, batch):
        assert json.loads(line_of(span)) == json.loads(line_of(span.made()))


def request_of(parent: Parent, num_stages: int) -> RecordedTrace:
    """Return what a request leaves whose last stage has failed."""
    times = range(1, num_stages)
    stages = [SpanPart(f"stage {n}", n, n + 0.5, {"tandem.image": n}, (), None) for n in times]
    failed = SpanPart("infer", 2.0, 3.0, None, (parent.span,), "out of memory")
    facts = {"request_id": "mine"}
    root = RecordedSpan(
        "POST", parent, parent.resource, (1.0, 9.0), facts, (), None, SpanContext(7, 8, False)
    )
    return RecordedTrace(root, [*stages, failed])


@pytest.mark.parametrize("num_stages", [1, 8])
def test_a_request_is_one_line_and_read_back_as_its_spans(tmp_path, request_span, num_stages):
    trace = request_of(current_parent(), num_stages)
    LocalSpans(tmp_path, 1).export([trace])
    (file,) = tmp_path.glob("*.jsonl")
    assert len(file.read_bytes().splitlines()) == 2  # the resource's, and its own
    expected = [json.loads(line_of(span)) for span in trace.spans()]
    found = list(read_spans(tmp_path))
    assert [span.pop("resource")["host.name"] for span in found] == ["here"] * (num_stages + 1)
    assert found == expected


def test_all_sinks_have_the_same_identities(request_span):
    trace = request_of(current_parent(), 3)
    line = json.loads(line_of(trace))
    made = [span.made().context.span_id for span in trace.spans()]
    assert [int(part[0], 16) for part in line["below"]] == made[:-1]
    assert made[-1] == 8


def test_a_file_that_goes_while_the_folder_is_read_is_left_out(tmp_path, spans):
    """A service that makes room removes the oldest."""
    LocalSpans(tmp_path, 1).export(spans)
    (file,) = tmp_path.glob("*.jsonl")
    file.with_name("another.jsonl").write_bytes(file.read_bytes())
    newest, oldest = sorted(tmp_path.glob("*.jsonl"), key=lambda p: p.stat().st_mtime, reverse=True)
    found = read_spans(tmp_path)
    next(found)  # the folder has been listed
    oldest.unlink()
    assert len(list(found)) == len(spans) - 1
    newest.unlink()
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert list(read_spans(tmp_path)) == []
