"""An address for traces that is none is refused with the settings, before Ray starts."""

import pytest
from pydantic import ValidationError

from app.settings import Settings


@pytest.mark.parametrize(
    ("exporter", "endpoint"),
    [
        ("otlp", "http://jaeger:4317"),
        ("otlp", "https://[::1]:4318/v1/traces"),
        ("otlp", None),
        ("jaeger", "udp://agent"),
        ("jaeger", "http://collector:14268"),
        ("none", "whatever"),
    ],
)
def test_what_is_taken(exporter, endpoint):
    assert Settings(trace_exporter=exporter, trace_endpoint=endpoint).trace_endpoint == endpoint


@pytest.mark.parametrize(
    ("exporter", "endpoint", "example"),
    [
        ("otlp", "jaeger:4317", "http://HOST:4317"),
        ("otlp", "udp://jaeger:6831", "http://HOST:4317"),
        ("otlp", "http://", "http://HOST:4317"),
        ("otlp", "http://jaeger:port", "http://HOST:4317"),
        ("otlp", "http://[::1", "http://HOST:4317"),
        ("otlp", "", "http://HOST:4317"),
        ("jaeger", "agent:6831", "udp://HOST:6831"),
        ("jaeger", "http://collector:99999", "udp://HOST:6831"),
    ],
)
def test_what_is_refused_and_what_would_do(exporter, endpoint, example):
    with pytest.raises(ValidationError, match=r"trace_endpoint is .*takes") as caught:
        Settings(trace_exporter=exporter, trace_endpoint=endpoint)
    assert example in str(caught.value)


def test_files_of_traces_are_refused_with_what_to_write():
    with pytest.raises(ValidationError, match=r"file is no exporter any more: .*trace_endpoint"):
        Settings.model_validate({"trace_exporter": "file"})
