"""Callers' traces in the formats of OTEL_PROPAGATORS, by OpenTelemetry's own packages."""

import importlib

import pytest
from fastapi import FastAPI
from opentelemetry import propagate, trace

from app.access import Keys
from app.grpc import call as grpc_call
from app.grpc.call import GrpcCall, answered
from app.http.api import ContinuedTraces, ObservedRequests
from app.telemetry.spans import continues_traces, current_parent, orphans
from tests.support.asgi_client import asgi_client
from tests.support.cases import cases
from tests.support.grpc_contexts import context_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ROOT = f"Root=1-{TRACE[:8]}-{TRACE[8:]}"
W3C = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
MULTI = {"X-B3-TraceId": TRACE, "X-B3-SpanId": SPAN, "X-B3-Sampled": "1"}


@pytest.fixture
def propagators(request, monkeypatch):
    """Load OpenTelemetry's choice anew, as a process does that starts with this variable."""
    monkeypatch.setenv("OTEL_PROPAGATORS", request.param)
    importlib.reload(propagate)
    yield
    monkeypatch.delenv("OTEL_PROPAGATORS")
    importlib.reload(propagate)


@pytest.fixture
async def client():
    api = FastAPI(telemetry={"tracing": False})

    @api.get("/thing")
    async def thing() -> bool:
        return current_parent() is not None

    async with asgi_client(ContinuedTraces(ObservedRequests(api, Keys([])))) as client:
        yield client


@cases(
    "propagators, headers",
    ("b3", {"b3": f"{TRACE}-{SPAN}-1"}),
    ("b3", {"B3": f"{TRACE}-{SPAN}-d-{SPAN}"}),
    ("b3multi", MULTI),
    ("tracecontext,b3multi", MULTI),
    ("xray", {"X-Amzn-Trace-Id": f"{ROOT};Parent={SPAN};Sampled=1"}),
    ("xray, b3", {"x-amzn-trace-id": f"Self=1-1-1;{ROOT};Parent={SPAN};Sampled=1"}),
    ("tracecontext,baggage", W3C),  # behind Serve's own proxy
    indirect=["propagators"],
)
async def test_the_callers_trace_goes_on_in_place_of_serves(
    client, exported, propagators, request_span, headers
):
    answer = await client.get("/thing", headers=headers)
    assert (answer.json(), answer.headers["x-trace-id"]) == (True, TRACE)
    (span,) = exported.get_finished_spans()
    assert (span.name, span.parent.span_id) == ("GET /thing", int(SPAN, 16))
    assert span.attributes["request_id"] == "mine"
    assert request_span.context.trace_id in orphans  # Serve's own span is not exported
    orphans.clear()


@cases(
    "propagators, headers",
    ("b3", {"b3": f"{TRACE}-{SPAN}-0"}),
    ("b3multi", MULTI | {"X-B3-Sampled": "0"}),
    ("xray", {"X-Amzn-Trace-Id": f"{ROOT};Parent={SPAN};Sampled=0"}),
    indirect=["propagators"],
)
async def test_a_caller_who_does_not_sample_has_no_trace(
    client, exported, propagators, request_span, headers
):
    answer = await client.get("/thing", headers=headers)
    assert (answer.json(), "x-trace-id" in answer.headers) == (False, False)
    assert not exported.get_finished_spans()
    orphans.clear()


@cases(
    "propagators, headers",
    ("b3", {}),
    ("b3", {"b3": "0"}),
    ("b3", {"b3": "nonsense"}),
    ("b3multi", {"X-B3-TraceId": "zz"}),
    ("xray", {"X-Amzn-Trace-Id": ROOT}),  # of a load balancer, without a parent
    ("xray", {"X-Amzn-Trace-Id": "Root=;;="}),
    indirect=["propagators"],
)
async def test_without_a_parent_serves_own_trace_stays(client, propagators, request_span, headers):
    answer = await client.get("/thing", headers=headers)
    assert answer.headers["x-trace-id"] == f"{request_span.context.trace_id:032x}"
    assert not orphans


@pytest.mark.parametrize("propagators", ["b3"], indirect=True)
async def test_a_grpc_call_too(monkeypatch, exported, propagators, request_span):
    monkeypatch.setattr(grpc_call, "has_own_traces", lambda: True)
    context = context_of(b3=f"{TRACE}-{SPAN}-1")
    call = GrpcCall("tandem.v1.Ensemble", "Classify", context)

    async def answer() -> str:
        return f"{trace.get_current_span().get_span_context().trace_id:032x}"

    assert await answered(call, answer, str) == TRACE
    (span,) = exported.get_finished_spans()
    assert (span.name, span.parent.span_id) == ("tandem.v1.Ensemble/Classify", int(SPAN, 16))
    orphans.clear()


@pytest.mark.parametrize(
    ("variable", "haproxy", "continues"),
    [("", "1", False), ("tracecontext,baggage", "1", False), ("b3", "1", True), ("", "0", True)],
)
def test_it_is_left_out_where_serve_does_it(monkeypatch, memory, variable, haproxy, continues):
    monkeypatch.setenv("OTEL_PROPAGATORS", variable)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", haproxy)
    assert continues_traces() is continues
