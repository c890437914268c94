"""OpenTelemetry's variables: unusable ones are named; without a collector no traces."""

import os
import subprocess
import sys

import pytest

from app.launch.config import ServeConfig
from app.launch.serve import leave_out_unusable, without_unsent_traces
from tests.support.configurations import GOOD

OURS = "app.telemetry.export:span_processors"
ENDPOINT = "http://collector:4317"


@pytest.fixture(autouse=True)
def none_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OTEL_PROPAGATORS", "b3", "no propagator 'b3' is installed, but baggage, "),
        ("OTEL_PROPAGATORS", "tracecontext, b3multi", "no propagator 'b3multi' is installed"),
        ("OTEL_PYTHON_CONTEXT", "mine", "no context 'mine' is installed"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "a number of seconds is wanted, without a unit"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1m", "a number of seconds is wanted"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "gzip or deflate or none is wanted"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "grpc or http/protobuf is wanted"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many", "a whole number is wanted"),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "-1", "a whole number is wanted"),
    ],
)
def test_one_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    (line,) = leave_out_unusable()
    assert line.startswith(f"{name}={value} is left out: {says}")
    assert name not in os.environ


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_PROPAGATORS", "tracecontext,baggage"),
        ("OTEL_PROPAGATORS", "none"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "2.5"),
        ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),
        ("OTEL_SPAN_LINK_COUNT_LIMIT", "12"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318"),
    ],
)
def test_one_that_can(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert leave_out_unusable() == []
    assert os.environ[name] == value


def test_an_empty_one_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PROPAGATORS", "")
    assert leave_out_unusable() == []
    assert "OTEL_PROPAGATORS" not in os.environ


def test_what_is_left_is_what_opentelemetry_can_be_imported_with() -> None:
    """Serve and FastAPI import these, in each process of Ray's."""
    script = (
        "from app.launch.serve import leave_out_unusable; leave_out_unusable();"
        "import opentelemetry.propagate, opentelemetry.sdk.trace"
    )
    unusable = {
        "OTEL_PROPAGATORS": "b3",
        "OTEL_PYTHON_CONTEXT": "x",
        "OTEL_SPAN_LINK_COUNT_LIMIT": "x",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | unusable, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "variables", "exporter", "is_on"),
    [
        ({}, {}, OURS, False),
        ({"trace_endpoint": ENDPOINT}, {}, OURS, True),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}, OURS, True),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ENDPOINT}, OURS, True),
        ({"trace_exporter": "jaeger"}, {}, OURS, True),  # to an agent of this machine
        ({"trace_exporter": "none", "trace_endpoint": ENDPOINT}, {}, OURS, False),
        ({}, {}, "mine:span_processors", True),  # the user's own, which the settings do not reach
    ],
)
def test_tracing_is_off_if_nobody_gets_the_spans(
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, str],
    variables: dict[str, str],
    exporter: str,
    is_on: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracing = {"enabled": True, "exporter_import_path": exporter, "sampling_ratio": 1.0}
    config = ServeConfig.of(GOOD | {"tracing_config": tracing}).changed(**arguments)
    served = without_unsent_traces(config).as_dict()["tracing_config"]
    assert served == (tracing if is_on else {"enabled": False})
