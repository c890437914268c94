"""A run of tandem serve: mistakes before Ray starts, where metrics are, OpenTelemetry."""

import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any

import pytest

from app.errors import ConfigError
from app.launch import serve
from app.launch.checks import METRICS_PORT
from app.launch.config import ServeConfig, default_config
from app.launch.deploy import client_of, wants_key
from app.launch.serve_options import ServeOptions
from app.setting_values import ApiKeyError
from tests.support.cases import cases
from tests.support.configurations import GOOD


def run_python(script: str, **variables: str) -> tuple[int, str, str]:
    command, env = [sys.executable, "-c", script], os.environ | variables
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_command_line_and_serve_are_imported_without_ray() -> None:
    """Ray reads its environment when it is imported; tandem serve sets it first."""
    script = "import sys, app.cli.serve, app.launch.serve; print('ray' in sys.modules)"
    assert run_python(script)[:2] == (0, "False\n")


@pytest.mark.parametrize("options", [{"http": {"port": METRICS_PORT}}, {"grpc_port": METRICS_PORT}])
def test_metrics_have_none_of_the_services_ports(monkeypatch, tmp_path, options):
    monkeypatch.setattr(serve, "local_ray", lambda *_: nullcontext())
    config = ServeConfig.read(default_config()).changed(**options)
    with serve._ray(ServeOptions(), config, None, tmp_path, {}) as (url,):
        assert url.startswith("http://127.0.0.1:")
        assert f":{METRICS_PORT}/" not in url


@pytest.mark.parametrize("host", ["fd00::5", "2001:db8:a::1"])
def test_an_address_is_printed_as_it_is(tiny_set, capsys, host):
    """Brackets around letters are markup to rich, and ":a:" is a picture."""
    config = ServeConfig.read(default_config())
    config = config.changed(http={"host": host}, grpc_port=9000, model_set=str(tiny_set))
    serve._welcome(config, [f"http://[{host}]:9464/metrics"], has_keys=False)
    said = capsys.readouterr().err
    for line in (
        f"ready at http://[{host}]:8000 (the page), http://[{host}]:8000/docs",
        f"@photo.jpg http://[{host}]:8000/v1/classify",
        f"gRPC: [{host}]:9000",
        f"metrics: http://[{host}]:9464/metrics",
    ):
        assert line in said


KEY = "k" * 32


@pytest.fixture
def options(tiny_set, free_port):
    return {"model_set": str(tiny_set), "port": free_port()}


def arguments_of(config: ServeConfig) -> dict[str, Any]:
    return config.content["applications"][0]["args"]


def test_the_file_of_keys_is_found_wherever_a_replica_runs(options, tmp_path, monkeypatch):
    """A cluster's keys are on its nodes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text(KEY)
    config = serve._checked_config(ServeOptions(**options, api_keys_file=Path("keys")))
    assert arguments_of(config)["api_keys_file"] == str(tmp_path / "keys")
    assert KEY not in str(config)
    there = tmp_path / "only on the nodes"
    config = serve._checked_config(ServeOptions(**options, address="auto", api_keys_file=there))
    assert arguments_of(config)["api_keys_file"] == str(there)


def test_keys_that_are_none_are_told_at_once(options, tmp_path, monkeypatch):
    with pytest.raises(ApiKeyError, match="cannot read the keys of"):
        serve._checked_config(ServeOptions(**options, api_keys_file=tmp_path / "nothing"))
    monkeypatch.setenv("TANDEM_API_KEYS", "short")
    with pytest.raises(ApiKeyError, match="TANDEM_API_KEYS, line 1: a key of 5 characters"):
        serve._checked_config(ServeOptions(**options))


def test_a_key_of_the_metrics_is_checked_and_not_for_a_cluster(options, tmp_path):
    with pytest.raises(ApiKeyError, match="cannot read the keys of"):
        serve._checked_config(ServeOptions(**options, metrics_key_file=tmp_path / "nothing"))
    (file := tmp_path / "key").write_text(KEY)
    with pytest.raises(ConfigError, match="--metrics-key-file with --address"):
        serve._checked_config(ServeOptions(**options, address="auto", metrics_key_file=file))


@pytest.mark.parametrize("host", ["", "a b"])
def test_an_address_of_the_metrics_that_is_none(options, host):
    """A socket bound to an empty text listens on all interfaces."""
    with pytest.raises(ConfigError, match=f"--metrics-host is '{host}': give an address"):
        serve._checked_config(ServeOptions(**options, metrics_host=host))


@pytest.mark.parametrize(("status", "wants"), [(401, True), (200, False), (503, False)])
def test_the_service_itself_is_asked(server, status, wants):
    server.get = (status, b"{}")
    assert wants_key(client_of(server.url)) is wants
    assert server.requests == [("/v1/models", b"")]
    assert wants_key(client_of("http://127.0.0.1:1")) is False  # a service that is gone


def test_what_others_can_do_is_said():
    alone = serve._exposure("0.0.0.0", False, "http://127.0.0.1:8000")
    assert "every machine that reaches this one may call; --api-keys-file" in alone
    assert "others can read it on the way" in alone
    guarded = serve._exposure("0.0.0.0", True, "https://127.0.0.1:8000")
    assert guarded.endswith("may call with a key")


OURS = "app.telemetry.export:span_processors"
ENDPOINT = "http://collector:4317"


@pytest.fixture(autouse=True)
def none_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@cases(
    "name, value, says",
    ("OTEL_PROPAGATORS", "b4", "no propagator 'b4' is installed, but b3, b3multi, baggage, "),
    ("OTEL_PROPAGATORS", "tracecontext, datadog", "no propagator 'datadog' is installed: "),
    ("OTEL_PYTHON_CONTEXT", "mine", "no context 'mine' is installed"),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "a number of seconds is wanted, without a unit"),
    ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1m", "a number of seconds is wanted"),
    ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "gzip or deflate or none is wanted"),
    ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "grpc or http/protobuf is wanted"),
    ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many", "a whole number is wanted"),
    ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "-1", "a whole number is wanted"),
    ("PYTHONOPTIMIZE", "2", "Ray's processes do not start without docstrings"),
    ("OTEL_PROPAGATORS", "", None),
)
def test_one_that_cannot_be_used(monkeypatch, name, value, says):
    """An empty one is not set."""
    monkeypatch.setenv(name, value)
    lines = serve.leave_out_unusable()
    if says is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(f"{name}={value} is left out: {says}")
    assert name not in os.environ


@pytest.mark.parametrize(("name", "extra"), [("b3", "b3"), ("b3multi", "b3"), ("xray", "xray")])
def test_a_propagator_whose_extra_is_not_installed(monkeypatch, name, extra):
    installed = entry_points(group="opentelemetry_propagator")
    rest = EntryPoints(point for point in installed if point.name != name)
    monkeypatch.setattr(serve, "entry_points", lambda group: rest)
    monkeypatch.setenv("OTEL_PROPAGATORS", f"tracecontext,{name}")
    (line,) = serve.leave_out_unusable()
    assert line.endswith(
        f"no propagator '{name}' is installed: pip install 'tandem-serve[{extra}]'"
    )


@cases(
    "name, value",
    ("OTEL_PROPAGATORS", "tracecontext,baggage"),
    ("OTEL_PROPAGATORS", "b3multi, xray"),
    ("OTEL_PROPAGATORS", "none"),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", "2.5"),
    ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip"),
    ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),
    ("OTEL_SPAN_LINK_COUNT_LIMIT", "12"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318"),
)
def test_one_that_can(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert serve.leave_out_unusable() == []
    assert os.environ[name] == value


def test_what_is_left_is_what_opentelemetry_can_be_imported_with() -> None:
    """Serve and FastAPI import these, in each process of Ray's."""
    script = (
        "from app.launch.serve import leave_out_unusable; leave_out_unusable();"
        "import opentelemetry.propagate, opentelemetry.sdk.trace"
    )
    names = ("OTEL_PROPAGATORS", "OTEL_PYTHON_CONTEXT", "OTEL_SPAN_LINK_COUNT_LIMIT")
    assert run_python(script, **dict.fromkeys(names, "x")) == (0, "", "")


@cases(
    "arguments, variable, exporter, is_on",
    ({}, None, OURS, False),
    ({"trace_endpoint": ENDPOINT}, None, OURS, True),
    ({}, "OTEL_EXPORTER_OTLP_ENDPOINT", OURS, True),
    ({}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", OURS, True),
    ({"trace_exporter": "jaeger"}, None, OURS, True),  # to an agent of this machine
    ({"trace_exporter": "none", "trace_endpoint": ENDPOINT}, None, OURS, False),
    ({}, None, "mine:span_processors", True),  # the user's own: the settings do not reach it
)
def test_tracing_is_off_if_nobody_gets_the_spans(monkeypatch, arguments, variable, exporter, is_on):
    if variable is not None:
        monkeypatch.setenv(variable, ENDPOINT)
    tracing = {"enabled": True, "exporter_import_path": exporter, "sampling_ratio": 1.0}
    config = ServeConfig.of(GOOD | {"tracing_config": tracing}).changed(**arguments)
    served = serve.without_unsent_traces(config).as_dict()["tracing_config"]
    assert served == (tracing if is_on else {"enabled": False})
