"""``tandem trace``: the list, the waterfall, what Jaeger opens."""

import json

import pytest

from tests.support.command_line import tandem

MS = 10**6


def span(name: str, start_ms: float, end_ms: float, number: int, **changes) -> dict:
    return {
        "trace_id": "ab" * 16,
        "span_id": f"{number:016x}",
        "parent_id": f"{1:016x}" if number > 1 else None,
        "name": name,
        "kind": "INTERNAL",
        "start_ns": 1_790_000_000_000_000_000 + int(start_ms * MS),
        "end_ns": 1_790_000_000_000_000_000 + int(end_ms * MS),
        "attributes": {},
        "links": [],
        "error": None,
        "resource": {"service.name": "tandem", "host.name": "here"},
    } | changes


BATCH = {"trace_id": "cd" * 16, "span_id": f"{9:016x}"}
REQUEST = {"request_id": "mine", "http.response.status_code": 200}
SPANS = [
    span("POST /v1/classify", 0, 40, 1, attributes=REQUEST, kind="SERVER"),
    span("decode", 1, 4, 2, attributes={"tandem.width": 500}),
    span("queue", 4, 10, 3, attributes={"tandem.member": "resnet50"}),
    span(
        "infer", 10, 38, 4, attributes={"tandem.member": "resnet50", "tandem.batch_size": 4},
        links=[BATCH],
    ),
    span("decode", 1, 2, 5, error="not an image", attributes={"tandem.image": 1}),
    span("GET /v1/models", 90, 91, 7, trace_id="ef" * 16, parent_id=None,
         attributes={"request_id": "other", "http.response.status_code": 200}),
    span("batch", 10, 38, 9, **BATCH, parent_id=None,
         attributes={"tandem.member": "resnet50", "tandem.batch_size": 4},
         links=[{"trace_id": "ab" * 16, "span_id": f"{1:016x}"},
                {"trace_id": "00" * 16, "span_id": f"{1:016x}"}]),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for number, part in enumerate((SPANS[:3], SPANS[3:])):  # of two processes
        text = "".join(json.dumps(one) + "\n" for one in part)
        (tmp_path / f"{number}.jsonl").write_text(text)
    return tmp_path


def test_the_last_requests_are_listed_newest_first(folder):
    done = tandem("trace", "--dir", folder)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "GET /v1/models" in lines[1]
    assert lines[2].split()[-5:] == ["POST", "/v1/classify", "200", "40.0", "mine"]
    rows = json.loads(tandem("trace", "--dir", folder, "--json", "--last", "1").stdout)
    assert [row["request_id"] for row in rows] == ["other"]


@pytest.mark.parametrize("identity", ["mine", "ab" * 16])
def test_a_request_is_drawn(folder, identity):
    done = tandem("trace", identity, "--dir", folder)
    assert done.exit_code == 0, done.output
    root, decode, failed, queue, infer = done.stdout.splitlines()[3:8]
    assert root.split()[-2:] == ["0.00", "40.00"]
    assert decode.startswith("  decode ")
    assert failed.startswith("  decode #1")
    assert infer.startswith("  infer resnet50 x4")
    # The bars lie on one axis: a stage begins where the one before it ends.
    assert queue.rstrip("0123456789. ").index("█") == 34 + 2 + round(0.1 * (200 - 58))
    assert infer.count("█") == pytest.approx(0.7 * (200 - 58), abs=1)
    assert "batch of 4 in resnet50, shared with 1 other request\n" in done.stdout
    assert "decode #1: not an image" in done.stdout


def test_what_jaegers_page_opens(folder, tmp_path):
    file = tmp_path / "out.json"
    done = tandem("trace", "mine", "--dir", folder, "--export", file)
    assert done.exit_code == 0, done.output
    request, batch = json.loads(file.read_text())["data"]
    assert request["traceID"] == "ab" * 16
    by_name = {row["operationName"]: row for row in request["spans"]}
    infer = by_name["infer"]
    assert infer["duration"] == 28_000
    assert infer["startTime"] == 1_790_000_000_000_000 + 10_000
    assert [r["refType"] for r in infer["references"]] == ["CHILD_OF", "FOLLOWS_FROM"]
    assert {"key": "tandem.batch_size", "type": "int64", "value": 4} in infer["tags"]
    assert request["processes"][infer["processID"]]["serviceName"] == "tandem"
    assert len(batch["spans"][0]["references"]) == 2
    failed = [
        row
        for row in request["spans"]
        if {"key": "error", "type": "bool", "value": True} in row["tags"]
    ]
    assert len(failed) == 1


def test_the_spans_as_json(folder):
    done = tandem("trace", "mine", "--dir", folder, "--json")
    found = json.loads(done.stdout)
    assert [s["name"] for s in found["spans"]] == [
        "POST /v1/classify",
        "decode",
        "decode",
        "queue",
        "infer",
    ]
    assert [b["span_id"] for b in found["batches"]] == [BATCH["span_id"]]


def test_a_request_that_is_not_there(folder):
    done = tandem("trace", "nobody", "--dir", folder)
    assert done.exit_code != 0
    assert "tandem trace lists the traces that are kept" in str(done.exception)


@pytest.mark.parametrize("arguments", [(), ("--export", "x.json")])
def test_no_traces_at_all(tmp_path, arguments, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = tandem("trace", "--dir", tmp_path / "missing", *arguments)
    assert done.exit_code != 0
    assert "tracing_config" in str(done.exception)
    assert not (tmp_path / "x.json").exists()


def test_the_trace_is_not_written_to_stdout(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = tandem("trace", "mine", "--dir", folder, "--export", "-")
    assert "--export - is no file; name one, such as trace.json" in str(done.exception)
    assert not (tmp_path / "-").exists()
