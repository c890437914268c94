"""Stages recorded after the fact: times, parents, links, and clocks that are set."""

import asyncio
import logging
import time
from dataclasses import dataclass

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk import resources
from opentelemetry.trace import SpanContext

from app.queueing.scheduler import BatchResult, ExecutedBatch
from app.telemetry.spans import (
    Clock,
    MemberSpans,
    continue_below,
    current_ids,
    current_parent,
    record,
    untraced,
)

ROW = np.zeros(3, np.float32)


def test_without_a_sampled_request_there_is_no_parent(exported):
    assert current_parent() is None
    unsampled = trace.NonRecordingSpan(trace.INVALID_SPAN_CONTEXT)
    with trace.use_span(unsampled):
        assert current_parent() is None


def test_what_is_to_leave_no_trace_begins_none_either(exported, request_span):
    def call() -> None:
        assert current_parent() is None
        with trace.get_tracer("serve").start_as_current_span("route_to_replica") as span:
            assert not span.is_recording()
            assert not span.get_span_context().trace_flags.sampled

    untraced().run(call)
    assert not exported.get_finished_spans()


def test_a_stage_has_its_own_times_and_the_request_above_it(exported, request_span):
    before_ns, began = time.time_ns(), time.monotonic()
    record("decode", parent(), began, began + 0.25, {"tandem.bytes": 7})
    (span,) = exported.get_finished_spans()
    assert span.parent.span_id == request_span.context.span_id
    assert span.context.trace_id == request_span.context.trace_id
    assert span.end_time - span.start_time == pytest.approx(0.25e9, abs=1000)
    assert span.start_time == pytest.approx(before_ns, abs=5e6)
    assert dict(span.attributes) == {"tandem.bytes": 7}
    assert not span.status.description


async def test_a_part_of_a_call_of_many_is_below_its_own_request(exported):
    """By the ids that the caller sent, whatever span Serve made for the call itself."""
    requests = {}
    for name in ("a", "b"):
        with trace.get_tracer("serve").start_as_current_span(name):
            requests[name] = current_ids()
    exported.clear()

    async def part(name: str) -> None:
        continue_below(requests.get(name))
        await asyncio.sleep(0)
        if (parent := current_parent()) is not None:
            record(f"decode {name}", parent, 1.0, 2.0)

    assert requests["a"] != requests["b"]
    await asyncio.gather(*map(part, ("a", "b", "untraced")))
    found = {span.name: span for span in exported.get_finished_spans()}
    assert set(found) == {"decode a", "decode b"}
    for name, ids in requests.items():
        span = found[f"decode {name}"]
        assert (span.context.trace_id, span.parent.span_id) == ids
        assert span.resource.attributes["host.name"] == "here"
    assert current_ids() is None


def test_no_span_costs_a_hash_of_the_whole_resource(exported, request_span, monkeypatch):
    for name in ("decode", "infer"):
        record(name, parent(), 1.0, 2.0)
    spans = exported.get_finished_spans()
    monkeypatch.setattr(resources, "dumps", None)  # the SDK's hash is one of JSON
    (encoded,) = encode_spans(spans).resource_spans
    assert [len(scope.spans) for scope in encoded.scope_spans] == [2]
    assert spans[0].resource.attributes == request_span.resource.attributes


def test_a_failed_stage_says_why(exported, request_span):
    record("decode", parent(), 1.0, 2.0, error="not an image")
    (span,) = exported.get_finished_spans()
    assert (span.status.is_ok, span.status.description) == (False, "not an image")


@dataclass
class Call:
    """Whose images are in a batch."""

    parent: SpanContext | None = None

    def image_ended(self, entry: object) -> None:
        """Nobody waits."""


def parent() -> SpanContext:
    """Return the span that the test runs in."""
    current = current_parent()
    assert current
    return current


def begun() -> Call:
    """Return a call within a traced request of its own."""
    with trace.get_tracer("serve").start_as_current_span("request"):
        return Call(parent())


def test_a_batch_links_to_every_request_in_it_once(exported):
    first, second, untraced_call = begun(), begun(), Call()
    exported.clear()
    MemberSpans("resnet50").executed(ExecutedBatch(5.0, 5.5, (first, first, untraced_call, second)))
    (span,) = exported.get_finished_spans()
    assert [link.context for link in span.links] == [first.parent, second.parent]
    assert span.parent is None
    assert span.context.trace_id not in {call.parent.trace_id for call in (first, second)}
    assert dict(span.attributes) == {"tandem.member": "resnet50", "tandem.batch_size": 4}
    assert span.end_time - span.start_time == pytest.approx(0.5e9, abs=1000)


def test_a_batch_without_traced_requests_is_not_recorded(exported):
    MemberSpans("resnet50").executed(ExecutedBatch(5.0, 5.5, (Call(),)))
    assert not exported.get_finished_spans()


def test_a_failed_batch_says_why(exported):
    call = begun()
    exported.clear()
    MemberSpans("a").executed(ExecutedBatch(1.0, 2.0, (call,), ValueError("no")))
    (span,) = exported.get_finished_spans()
    assert span.status.description == "ValueError: no"


def test_each_image_has_its_wait_and_its_run_and_the_batch_that_it_was_in(exported, request_span):
    member, call = MemberSpans("a"), Call(parent())
    batch = ExecutedBatch(3.0, 3.5, (call, Call(), Call(), Call()))
    member.executed(batch)
    member.answered(parent(), [BatchResult(ROW, 0.25, batch)])
    ran, queue, infer = exported.get_finished_spans()
    assert (ran.name, queue.name, infer.name) == ("batch", "queue", "infer")
    assert queue.end_time == pytest.approx(infer.start_time, abs=1e5)
    assert queue.end_time - queue.start_time == pytest.approx(0.25e9, abs=1000)
    assert infer.end_time - infer.start_time == pytest.approx(0.5e9, abs=1000)
    assert [link.context for link in infer.links] == [ran.context]
    assert infer.attributes["tandem.batch_size"] == 4


def test_leaving_the_queue_without_an_answer_is_told(exported, request_span):
    MemberSpans("a").failed(parent(), time.monotonic() - 1, TimeoutError("late"))
    (span,) = exported.get_finished_spans()
    assert span.name == "queue"
    assert span.status.description == "TimeoutError: late"


def test_nothing_is_kept_of_batches_that_nobody_knows(request_span):
    member, call = MemberSpans("a"), Call(parent())
    batch = ExecutedBatch(3.0, 3.5, (call, call))
    member.executed(batch)
    member.answered(parent(), [BatchResult(ROW, 0.0, batch)])
    del batch
    assert not member._batch_spans


def test_an_interruption_between_the_two_clocks_moves_no_span(monkeypatch):
    now, interruptions = [0], [5_000_000, 0, 7_000_000]  # ns that the thread loses

    def system() -> int:
        now[0] += interruptions.pop(0) if interruptions else 0
        return 1_000_000_000 + now[0]

    def monotonic() -> int:
        now[0] += 100
        return now[0]

    monkeypatch.setattr(time, "time_ns", system)
    monkeypatch.setattr(time, "monotonic_ns", monotonic)
    assert Clock().offset_ns() == pytest.approx(1_000_000_000, abs=200)


def test_a_clock_that_steps_back_is_told_once_and_counted(monkeypatch, caplog):
    clock, real = Clock(), time.time_ns
    with caplog.at_level(logging.WARNING, "ray.serve"):
        clock.offset_ns()
        assert clock.num_steps == 0
        for back_s in (3600, 7200):
            monkeypatch.setattr(time, "time_ns", lambda s=back_s: real() - s * 10**9)
            clock.offset_ns()
            clock.offset_ns()
    assert clock.num_steps == 2
    assert len(caplog.records) == 1
    assert "-3600.0 s" in caplog.text
