"""Files of spans: what is written is read back, within a bound, on a full disk too."""

import json
import shutil
import time
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from app.tracing import local_spans
from app.tracing.local_spans import LocalSpans, line_of, read_spans
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
    monkeypatch.setattr(time, "time_ns", lambda: next(numbers) * 10**6)
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


def test_a_text_with_unicodes_line_ends_is_read_whole(tmp_path, spans):
    LocalSpans(tmp_path, 1).export(spans)
    (file,) = tmp_path.glob("*.jsonl")
    file.write_text(file.read_text("utf-8").replace('"mine"', '"a\u2028b\x85c"'), "utf-8")
    (request,) = (span for span in read_spans(tmp_path) if span["name"] == "request")
    assert request["attributes"] == {"request_id": "a\u2028b\x85c"}


@pytest.mark.parametrize("free", [0, 100])
def test_a_full_disk_raises_which_the_sink_counts(tmp_path, spans, free):
    exporter = LocalSpans(tmp_path, 1)
    with full_disk(free), pytest.raises(OSError, match="large"):
        exporter.export(spans)
    exporter.export(spans)  # as if nothing had been written
    kept = list(read_spans(tmp_path))
    assert [span["name"] for span in kept] == [span.name for span in spans]
    assert kept[0]["resource"]["host.name"] == "here"


def removed_by_another_process(folder: Path) -> None:
    """Remove the only file, as a process does that makes room."""
    (file,) = folder.iterdir()
    file.unlink()


@pytest.mark.parametrize("remove", [shutil.rmtree, removed_by_another_process])
def test_what_is_removed_is_made_again_and_nothing_is_lost(tmp_path, spans, remove):
    exporter = LocalSpans(tmp_path / "traces", 1)
    exporter.export(spans)
    remove(tmp_path / "traces")
    for _ in range(2):
        assert exporter.export(spans) is SpanExportResult.SUCCESS
    kept = list(read_spans(tmp_path / "traces"))
    assert len(kept) == 2 * len(spans)
    assert {span["resource"].get("host.name") for span in kept} == {"here"}


def test_a_folder_that_is_none_has_no_spans(tmp_path):
    assert list(read_spans(tmp_path / "missing")) == []


def test_a_line_is_one_line(spans):
    assert b"\n" not in line_of(spans[0])
    assert json.loads(line_of(spans[0]))["kind"] == "INTERNAL"


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
