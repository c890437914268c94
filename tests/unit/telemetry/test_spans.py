"""Spans: of stages, the cache, own functions and gRPC calls, and how they are recorded."""

import asyncio
import logging
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from fastapi import FastAPI, HTTPException
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk import resources
from opentelemetry.trace import SpanContext

from app.access import Keys
from app.answers import Fault
from app.errors import FunctionError
from app.graph.request import ClassifyRequest
from app.grpc.call import GrpcCall
from app.http.api import ObservedRequests
from app.queueing.scheduler import BatchResult, ExecutedBatch
from app.settings import Settings
from app.stages.classifier import Classifier
from app.stages.combiner import Combiner
from app.stages.decoder import Decoder
from app.telemetry.metric_table import STAGE_MS
from app.telemetry.metrics import RequestObserver
from app.telemetry.spans import (
    Clock,
    MemberSpans,
    continue_below,
    current_ids,
    current_parent,
    record,
    untraced,
)
from models import image_header
from models.model_set import load_model_set
from tests.support.asgi_client import asgi_client
from tests.support.fakes import FakeDecoder, FakeMember, service_of
from tests.support.grpc_contexts import context_of
from tests.support.tiny_networks import picture

ROW = np.zeros(3, np.float32)
OWN = "tests.support.own_functions"


def test_a_parent_is_where_the_code_runs_and_there_is_none_without_a_sampled_request(exported):
    assert current_parent() is None
    with trace.use_span(trace.NonRecordingSpan(trace.INVALID_SPAN_CONTEXT)):
        assert current_parent() is None
    for name in ("request", "replica"):
        with trace.get_tracer("serve").start_as_current_span(name) as span:
            assert current_parent() == span.get_span_context()


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
            record(name, parent, 1.0, 2.0)

    assert requests["a"] != requests["b"]
    await asyncio.gather(*map(part, ("a", "b", "untraced")))
    spans = exported.get_finished_spans()
    assert {s.name: (s.context.trace_id, s.parent.span_id) for s in spans} == requests
    assert {span.resource.attributes["host.name"] for span in spans} == {"here"}
    assert current_ids() is None


def test_no_span_costs_a_hash_of_the_whole_resource(exported, request_span, monkeypatch):
    for name in ("decode", "infer"):
        record(name, parent(), 1.0, 2.0)
    spans = exported.get_finished_spans()
    monkeypatch.setattr(resources, "dumps", None)  # the SDK's hash is one of JSON
    (encoded,) = encode_spans(spans).resource_spans
    assert [len(scope.spans) for scope in encoded.scope_spans] == [2]
    assert spans[0].resource.attributes == request_span.resource.attributes


def test_what_failed_says_why(exported, request_span):
    """A stage, and leaving the queue without an answer."""
    record("decode", parent(), 1.0, 2.0, error="not an image")
    MemberSpans("a").failed(parent(), time.monotonic() - 1, TimeoutError("late"))
    decode, queue = exported.get_finished_spans()
    assert (decode.status.is_ok, decode.status.description) == (False, "not an image")
    assert (queue.name, queue.status.description) == ("queue", "TimeoutError: late")


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


def test_a_batch_links_to_every_request_in_it_once_and_a_failed_one_says_why(exported):
    first, second = begun(), begun()
    exported.clear()
    calls = (first, first, Call(), second)
    MemberSpans("resnet50").executed(ExecutedBatch(5.0, 5.5, calls))
    MemberSpans("a").executed(ExecutedBatch(1.0, 2.0, calls, ValueError("no")))
    span, failed = exported.get_finished_spans()
    assert [link.context for link in span.links] == [first.parent, second.parent]
    assert span.parent is None
    assert span.context.trace_id not in {call.parent.trace_id for call in (first, second)}
    assert dict(span.attributes) == {"tandem.member": "resnet50", "tandem.batch_size": 4}
    assert span.end_time - span.start_time == pytest.approx(0.5e9, abs=1000)
    assert failed.status.description == "ValueError: no"


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
    del batch  # nothing is kept of batches that nobody knows
    assert not member._batch_spans


def test_an_interruption_between_the_two_clocks_moves_no_span(monkeypatch):
    now, interruptions = 0, [5_000_000, 0, 7_000_000]  # ns that the thread loses

    def passed(ns: int) -> int:
        nonlocal now
        now += ns
        return now

    def system() -> int:
        return 1_000_000_000 + passed(interruptions.pop(0) if interruptions else 0)

    monkeypatch.setattr(time, "time_ns", system)
    monkeypatch.setattr(time, "monotonic_ns", lambda: passed(100))
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
    assert (clock.num_steps, len(caplog.records)) == (2, 1)
    assert "-3600.0 s" in caplog.text


# The stages' own spans: the HTTP request, the Decoder, the members, the Gateway's clock.


@pytest.fixture
def settings(tiny_set) -> Settings:
    return Settings(model_set=str(tiny_set), batch_sizes=(1, 2), compile_cache=None)


@pytest.fixture
async def client():
    api = FastAPI(telemetry={"tracing": False})
    api.add_middleware(ObservedRequests, keys=Keys([]))

    @api.get("/things/{name}")
    async def thing(name: str) -> str:
        if name == "none":
            raise HTTPException(404)
        return name

    async with asgi_client(api) as client:
        yield client


async def test_a_traced_request_is_named_and_the_client_told(client, exported, request_span):
    answer = await client.get("/things/name")
    assert answer.headers["x-trace-id"] == f"{request_span.context.trace_id:032x}"
    assert request_span.name == "GET /things/{name}"
    assert request_span.attributes["http.response.status_code"] == 200
    await client.get("/things/none")
    assert request_span.attributes["http.response.status_code"] == 404
    await client.get("/nothing")
    assert request_span.name == "GET"
    with trace.use_span(trace.INVALID_SPAN):
        answer = await client.get("/things/name")
    assert (answer.status_code, "x-trace-id" in answer.headers) == (200, False)


async def test_each_image_is_decoded_in_a_span_of_its_own(settings, exported, request_span):
    png = picture("green", side=40)
    await Decoder(settings).decode([png, b"no image"])
    good, bad = exported.get_finished_spans()
    assert (good.name, bad.name) == ("decode", "decode")
    of_file = {"image": 0, "bytes": len(png), "format": "png", "width": 40, "height": 40}
    assert dict(good.attributes) == {f"tandem.{name}": value for name, value in of_file.items()}
    assert good.status.description is None
    assert "image" in bad.status.description
    assert {s.parent.span_id for s in (good, bad)} == {request_span.context.span_id}


@pytest.mark.parametrize("file", [b"\xff\xd8\xff no header", picture("red")])
async def test_a_header_is_never_read_on_the_event_loop(
    settings, monkeypatch, exported, request_span, file
):
    """It may take a third of a second: of a 20 MB file crafted for it."""
    readers, read = [], image_header.read_header

    def noting(data: bytes) -> object:
        readers.append(threading.current_thread())
        return read(data)

    decoder = Decoder(settings)  # it reads a picture of its own
    for module in ("app.stages.decoder", "models.image"):
        monkeypatch.setattr(f"{module}.read_header", noting)
    await decoder.decode([file])
    assert readers
    assert threading.main_thread() not in readers
    assert exported.get_finished_spans()


async def test_a_member_records_every_images_wait_and_run(settings, exported, request_span):
    await Classifier(settings, "sure").classify(blank(settings, 3), 10.0)
    spans = [span for span in exported.get_finished_spans() if span.name != "batch"]
    assert [s.name for s in spans] == ["queue", "infer"] * 3
    assert [s.attributes["tandem.image"] for s in spans] == [0, 0, 1, 1, 2, 2]
    assert [s.attributes["tandem.batch_size"] for s in spans if s.name == "infer"] == [2, 2, 1]
    assert {s.attributes["tandem.member"] for s in spans} == {"sure"}


async def test_without_a_trace_nothing_is_recorded(settings, exported):
    await Decoder(settings).decode([picture("green"), b"no image"])
    await Classifier(settings, "sure").classify(blank(settings, 1), 10.0)
    MemberSpans("resnet50").executed(ExecutedBatch(5.0, 5.5, (Call(),)))
    RequestObserver().stage_ended("read", 0.0)
    context = context_of()
    GrpcCall("tandem.v1.Ensemble", "Classify", context).ended()
    assert dict(context.trailing_metadata()) == {"request_id": "r1"}
    assert not exported.get_finished_spans()


def test_the_gateways_observer_records_its_own_stages(exported, request_span):
    observer = RequestObserver()
    observer.timed("decode", observer.elapsed_ms())
    observer.stage_ended("combine", observer.elapsed_ms())
    span = observer._stages["combine"]
    (recorded,) = exported.get_finished_spans()
    assert (recorded.name, recorded.parent.span_id) == ("combine", request_span.context.span_id)
    took_ms = (recorded.end_time - recorded.start_time) / 1e6
    assert took_ms == pytest.approx(span.end_ms - span.start_ms, abs=0.01)


def blank(settings: Settings, count: int) -> np.ndarray:
    rule = load_model_set(settings.model_set).manifest.image.rule
    return np.zeros((count, *rule.shape), np.uint8)


async def classify(settings: Settings, *requests: list[bytes]) -> None:
    """Answer requests with the real service in front of fake members."""
    members = {"sure": FakeMember(), "unsure": FakeMember()}
    service = service_of(settings, FakeDecoder(), members, Combiner(settings))
    for files in requests:
        await service.classify(ClassifyRequest(files, 1, 10.0, "id", RequestObserver()))


async def test_a_look_into_the_cache_is_a_span(tiny_set, exported, request_span):
    settings = Settings(model_set=str(tiny_set), cache="local")
    await classify(settings, [b"good"], [b"good", b"good two", b"good two"])
    first, second = [span for span in exported.get_finished_spans() if span.name == "cache"]
    counts = [[span.attributes[f"tandem.cache.{k}"] for k in ("hit", "miss", "shared")]
              for span in (first, second)]  # fmt: skip
    assert counts == [[0, 1, 0], [1, 1, 1]]
    assert second.parent.span_id == request_span.context.span_id
    assert second.start_time <= second.end_time


async def test_each_call_is_a_span(tiny_set, told, exported, request_span):
    names = {"preprocess": f"{OWN}:raises_on_many", "combine": f"{OWN}:vote"}
    with pytest.raises(FunctionError):
        await classify(Settings(model_set=str(tiny_set), **names), [b"good"], [b"good"] * 4)
    finished = exported.get_finished_spans()
    spans = [span for span in finished if span.name == "function"]
    assert [span.attributes["tandem.stage"] for span in spans] == [*names, "preprocess"]
    assert [span.attributes["tandem.function"] for span in spans[:2]] == [*names.values()]
    assert all(span.parent.span_id == request_span.context.span_id for span in spans)
    assert [span.status.description for span in spans] == [None, None, "ValueError: too many"]
    assert {"preprocess", "combine"} <= {span.name for span in finished}
    assert ("preprocess", "none") in told.observed(STAGE_MS)


def test_a_call_names_its_span_and_tells_its_trace(request_span):
    context = context_of()
    call = GrpcCall("tandem.v1.Ensemble", "Classify", context)
    call.refuse(Fault(429, "overloaded", "full"))
    call.ended()
    trace_id = f"{request_span.context.trace_id:032x}"
    assert dict(context.trailing_metadata())["x-trace-id"] == trace_id
    assert request_span.name == "tandem.v1.Ensemble/Classify"
    status = {"rpc.response.status_code": "RESOURCE_EXHAUSTED"}
    assert request_span.attributes == {"request_id": "mine"} | status


async def test_the_requests_span_says_which_version_answered(tiny_set, exported, request_span):
    await classify(Settings(model_set=str(tiny_set)), [b"good"])
    version = load_model_set(str(tiny_set)).fingerprint()
    assert request_span.attributes["tandem.model_version"] == version
    assert "cache" not in [span.name for span in exported.get_finished_spans()]
