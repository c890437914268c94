"""A tracer provider as Serve makes one, whose spans the tests look at."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from app.telemetry.spans import outlets

RESOURCE = Resource.create({"service.name": "tandem", "host.name": "here"})


@pytest.fixture(scope="session")
def memory() -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), resource=RESOURCE)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)  # once in a process: other tests have no current span
    outlets.append(SimpleSpanProcessor(exporter).on_end)
    return exporter


@pytest.fixture
def exported(memory: InMemorySpanExporter) -> InMemorySpanExporter:
    """What has ended, emptied for this test."""
    memory.clear()
    return memory


@pytest.fixture
def request_span(exported):
    """Run the test inside a request's span."""
    with trace.get_tracer("serve").start_as_current_span("request") as span:
        span.set_attribute("request_id", "mine")
        assert isinstance(span, Span)
        yield span


@pytest.fixture
def spans(exported: InMemorySpanExporter, request_span: Span) -> list[ReadableSpan]:
    """A request with two stages, as the SDK hands them to an exporter."""
    from app.telemetry.spans import current_parent, record

    parent = current_parent()
    assert parent is not None
    record("decode", parent, 10.0, 10.003, {"tandem.bytes": 1000})
    record("infer", parent, 10.003, 10.02, {"tandem.member": "a", "tandem.batch_size": 4})
    request_span.end()
    return list(exported.get_finished_spans())
