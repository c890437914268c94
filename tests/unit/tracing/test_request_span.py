"""A request's span of our own: as Serve would begin it, recorded once it is over."""

import contextvars
from collections.abc import Callable
from typing import TypeVar

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind

from app.tracing.parents import current_ids, current_parent
from app.tracing.request_span import RequestSpan, RequestTracer
from app.tracing.spans import record

T = TypeVar("T")
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


@pytest.fixture
def tracer(exported) -> RequestTracer:
    found = RequestTracer.of_process("request")
    assert found is not None
    return found


def in_own_task(run: Callable[[], T]) -> T:
    """Run as a request's task does, in a context of its own."""
    return contextvars.copy_context().run(run)


def begun(tracer: RequestTracer, traceparent: str | None = None) -> RequestSpan | None:
    return in_own_task(lambda: tracer.begin(traceparent, None))


def test_it_is_recorded_with_what_it_is_given(tracer, exported):
    span = begun(tracer)
    assert not exported.get_finished_spans()
    span.end("POST /v1/classify", {"http.response.status_code": 200})
    (ended,) = exported.get_finished_spans()
    assert ended.name == "POST /v1/classify"
    assert ended.kind is SpanKind.SERVER
    assert ended.parent is None
    assert ended.context == span.context
    assert ended.context.trace_flags.sampled
    assert dict(ended.attributes) == {"http.response.status_code": 200}
    assert ended.resource.attributes["service.name"] == "tandem"
    assert ended.start_time <= ended.end_time


def test_stages_and_log_lines_find_it(tracer, exported):
    def serve() -> RequestSpan:
        span = tracer.begin(None, None)
        assert current_parent().span is span.context
        assert current_ids() == (span.context.trace_id, span.context.span_id)
        assert trace.get_current_span().get_span_context() == span.context  # the log's trace_id
        record("decode", current_parent(), 1.0, 2.0)
        assert not exported.get_finished_spans(), "they leave together"
        span.end("POST", {})
        return span

    span = in_own_task(serve)
    decode, root = exported.get_finished_spans()
    assert decode.parent == root.context == span.context
    assert decode.resource is root.resource, "exporters group spans by it"
    assert current_parent() is None


def test_what_ends_after_the_request_leaves_by_itself(tracer, exported):
    def serve() -> None:
        span, parent = tracer.begin(None, None), current_parent()
        span.end("POST", {})
        record("queue", parent, 1.0, 2.0, error="its caller went away")

    in_own_task(serve)
    root, queue = exported.get_finished_spans()
    assert queue.parent == root.context
    assert not queue.status.is_ok


def test_each_begins_a_trace_of_its_own(tracer):
    assert begun(tracer).context.trace_id != begun(tracer).context.trace_id


def test_the_clients_trace_is_continued(tracer, exported):
    def serve() -> RequestSpan:
        return tracer.begin(SAMPLED, "vendor=1")

    span = in_own_task(serve)
    span.end("POST", {})
    (ended,) = exported.get_finished_spans()
    assert f"{ended.context.trace_id:032x}" == TRACE
    assert f"{ended.parent.span_id:016x}" == SPAN
    assert ended.context.span_id != ended.parent.span_id
    assert ended.context.trace_state.get("vendor") == "1"


def test_what_the_client_does_not_sample_is_not_traced(tracer):
    def serve() -> None:
        assert tracer.begin(NOT_SAMPLED, None) is None
        assert current_parent() is None

    in_own_task(serve)


@pytest.mark.parametrize("traceparent", ["", "00", "00-zz-zz-01", f"00-{'0' * 32}-{SPAN}-01"])
def test_a_malformed_one_begins_a_trace(tracer, traceparent):
    span = begun(tracer, traceparent)
    assert span.parent is None
    assert f"{span.context.trace_id:032x}" != TRACE


def test_the_providers_sampler_decides():
    never = RequestTracer(TracerProvider(sampler=ParentBasedTraceIdRatio(0.0)), "request")
    assert begun(never) is None
    assert begun(never, SAMPLED) is not None
    half = RequestTracer(TracerProvider(sampler=ParentBasedTraceIdRatio(0.5)), "request")
    assert 0 < sum(begun(half) is not None for _ in range(100)) < 100
