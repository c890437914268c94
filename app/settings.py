"""Every setting of the application, in one place: the ``args:`` of serve_config.yaml.

Serve's own options (replicas, autoscaling, ports) stay in serve_config.yaml. This is also the only
module of ``app`` that touches the process environment.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from platformdirs import user_cache_path, user_state_path
from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.tracing.endpoint import check_endpoint
from models.image import DEFAULT_MAX_PIXELS
from models.model_set import search_path
from models.record import Precision

MIB = 2**20
Place = Literal["gateway", "deployment"]
AnswerPolicy = Literal["all", "quorum", "any"]
TraceExporter = Literal["otlp", "jaeger", "file", "none"]
KEYS_VARIABLE = "TANDEM_API_KEYS"
HAPROXY_COMMAND = "haproxy"  # in the run's folder: the command that Serve starts
RETRIED_BYTES = MIB  # a request up to this size goes to another Gateway when its own dies


class Settings(BaseModel):
    """What ``app.main:build`` takes; a key it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_set: str = Field("imagenette", description="name of a model set, or its folder's path")
    model_dirs: tuple[Path, ...] = Field((), description="searched for sets before the bundled")
    precision: Precision = Field("INT8", description="which of the set's networks are served")
    allow_unverified: bool = Field(
        False, description="serve INT8 even if it lost more accuracy than the set's max_drop"
    )
    cascade_margin: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="skip the other members when the first one's best two probabilities differ by "
        "this or more; null: never",
    )
    answer_policy: AnswerPolicy = Field(
        "all",
        description="which members must answer: all, quorum (more than half) or any; what is "
        "missing makes the answer degraded, and says so",
    )
    member_patience_s: float = Field(
        1.0,
        ge=0,
        le=60,
        description="how long the other members are waited for once enough have answered",
    )
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=256)], ...] = Field(
        (1, 2, 4, 8), min_length=1, description="compiled batch sizes; a batch is padded up"
    )
    decoder: Place = Field(
        "gateway", description="where the Decoder runs: the Gateway's process, or its own replicas"
    )
    members: Place = Field(
        "gateway",
        description="where the networks run: the Gateway's process, or their own replicas",
    )
    combiner: Place = Field(
        "gateway", description="where the Combiner runs: the Gateway's process, or its own replicas"
    )
    streams: int = Field(
        0, ge=0, description="batches that run at a time in a replica; 0: one on each of its cores"
    )
    affinity: bool = Field(
        False, description="each replica keeps to cores of its own, as many as its whole num_cpus"
    )
    decode_threads: int = Field(2, ge=1, description="images decoded at a time per Decoder")
    compile_cache: Path | None = Field(
        user_cache_path("tandem") / "openvino", description="compiled networks; null: no cache"
    )
    api_keys_file: Path | None = Field(
        None,
        description="only callers with a key of this file (one a line), or of the variable "
        "TANDEM_API_KEYS, are let in; null: no file",
    )
    max_body_bytes: int = Field(20 * MIB, ge=1, description="of one request, all files together")
    max_bytes_in_flight: int = Field(
        256 * MIB,
        ge=1,
        description="of all bodies that a Gateway holds at a time; more are answered 429",
    )
    max_pixels: int = Field(DEFAULT_MAX_PIXELS, ge=1, description="width x height of one image")
    max_files: int = Field(64, ge=1, description="files in one multipart request")
    max_concurrent_requests: int = Field(
        128, ge=1, description="under way per Gateway; more are answered 429 at once"
    )
    max_queued_images: int = Field(512, ge=1, description="waiting per member and replica")
    default_top_k: int = Field(5, ge=1, description="classes in an answer when not asked")
    request_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="a request's time; a client may ask for less"
    )

    trace_exporter: TraceExporter = Field(
        "otlp",
        description="where traces go: otlp (Jaeger since 1.35, any collector), jaeger (Thrift, for "
        "older ones), file (only trace_dir), none",
    )
    trace_endpoint: str | None = Field(
        None,
        description="of the exporter; null: OpenTelemetry's own variables, or this machine. otlp: "
        "http://HOST:4317 (gRPC) or http://HOST:4318; jaeger: udp://HOST:6831 or http://HOST:14268",
    )
    trace_dir: Path | None = Field(
        user_state_path("tandem") / "spans",
        description="traces are kept here too, for tandem trace; null: not",
    )
    trace_mib: int = Field(64, ge=1, description="of traces in trace_dir; the oldest go")

    @model_validator(mode="after")
    def _a_body_has_room(self) -> Self:
        if self.max_bytes_in_flight < self.max_body_bytes:
            raise ValueError(
                f"max_bytes_in_flight is {self.max_bytes_in_flight}, max_body_bytes "
                f"{self.max_body_bytes}: one body must have room; raise the first"
            )
        return self

    @model_validator(mode="after")
    def _traces_have_somewhere_to_go(self) -> Self:
        check_endpoint(self.trace_exporter, self.trace_endpoint)
        return self

    @property
    def model_search(self) -> tuple[Path, ...]:
        """Where model sets are looked for, in order."""
        return search_path(self.model_dirs)


def _fast_environment(haproxy: Path) -> dict[str, str]:
    """Return the environment that makes Ray Serve fast; needed before Ray starts.

    HAProxy as the ingress and Serve's throughput mode belong together (gRPC between deployments,
    user code on the replica's own loop). ``haproxy`` is the command that starts it.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # By default Serve looks at everything, and every process flushes its metrics, ten times a
        # second: most of what a service at rest costs (tests/load/startup.py).
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        # Throughput mode holds log lines back until there are a thousand; ours are few.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        # A decoded stack of 64 images at 224 px is 9.6 MB; a body may have max_body_bytes.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(128 * MIB),
        # A gRPC message is whole in memory before anybody can look at it: four times a body's
        # limit, so that a client that is over it is told so by us.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(80 * MIB),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(haproxy),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's own handler aborts the process on SIGTERM; Python's faulthandler reports crashes.
        "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    }


def node_environment(haproxy: Path) -> dict[str, str]:
    """Return the environment of a cluster's node: Serve is fast, and loses nothing."""
    return _fast_environment(haproxy) | {
        # What a Gateway had when it died goes to another: classifying changes nothing. HAProxy can
        # send again what it holds as a whole; what kills every Gateway it meets kills three.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_RETRIES": "2",
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(RETRIED_BYTES),
        # An HAProxy that died is found out by three of these: 30 s by default.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "30",  # silence in the middle of a body
    }


def serve_environment(run_dir: Path, free_ports: tuple[int, int]) -> dict[str, str]:
    """Return the environment of a Ray of our own, on a machine that it may share.

    ``run_dir`` and ``free_ports`` (metrics, statistics) keep two services on one machine apart:
    HAProxy's files and ports are fixed otherwise.
    """
    return _fast_environment(run_dir / HAPROXY_COMMAND) | {
        # Called in proxies and replicas before they listen.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "app.loopback:keep_to_loopback",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(run_dir / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(run_dir / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(run_dir),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(run_dir / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(run_dir / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_ports[1]),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "5",
        # Ctrl-C on a laptop should not wait for a load balancer to notice.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def environment_value(*names: str) -> str | None:
    """Return the first of these variables that is set and not empty."""
    return next((value for name in names if (value := os.environ.get(name))), None)


def keys_of_environment() -> str | None:
    """Return TANDEM_API_KEYS; set but empty is not the same as not set."""
    return os.environ.get(KEYS_VARIABLE)


def has_haproxy() -> bool:
    """Tell whether Serve puts HAProxy in front; its own proxy has other options."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


def prepend_to_environment(name: str, value: str) -> None:
    """Put ``value`` in front of a comma-separated variable; of what is said twice the last wins."""
    os.environ[name] = ",".join(part for part in (value, os.environ.get(name)) if part)


def set_environment(values: Mapping[str, str]) -> None:
    """Put ``values`` into the environment; what the user set already wins."""
    for name, value in values.items():
        os.environ.setdefault(name, value)
