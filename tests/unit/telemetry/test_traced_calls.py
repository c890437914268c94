"""A gRPC call within the span that Serve makes for it."""

from opentelemetry.sdk.trace import Span
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.answers import Fault
from app.grpc.call import GrpcCall
from tests.support.grpc_contexts import context_of


def test_a_call_names_its_span_and_tells_its_trace(request_span: Span):
    context = context_of()
    call = GrpcCall("tandem.v1.Ensemble", "Classify", context)
    call.refuse(Fault(429, "overloaded", "full"))
    call.ended()
    trace_id = f"{request_span.context.trace_id:032x}"
    assert dict(context.trailing_metadata())["x-trace-id"] == trace_id
    assert request_span.name == "tandem.v1.Ensemble/Classify"
    assert request_span.attributes == {
        "request_id": "mine",
        "rpc.response.status_code": "RESOURCE_EXHAUSTED",
    }


def test_a_call_that_is_not_sampled_tells_none(exported: InMemorySpanExporter):
    context = context_of()
    GrpcCall("tandem.v1.Ensemble", "Classify", context).ended()
    assert dict(context.trailing_metadata()) == {"request_id": "r1"}
    assert exported.get_finished_spans() == ()
