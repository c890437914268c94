"""The process environment: what makes Ray Serve fast, and what the user set there.

Serve reads its environment once, when it is imported, and whatever Ray starts inherits it. This is
the only module of ``app`` that sets it; ``launch/fork_client.py``, which imports nothing of ours,
reads one variable.
"""

import logging
import os
from collections.abc import Collection, Mapping
from logging.handlers import MemoryHandler
from pathlib import Path

PROJECT = Path(__file__).parents[1]  # has the packages, serve_config.yaml and configs
KIB, MIB = 2**10, 2**20
KEYS_VARIABLE = "TANDEM_API_KEYS"
CALLERS_KEY_VARIABLE = "TANDEM_API_KEY"
PROGRAM = str(Path(__file__).parent) + os.sep
# The folder of entries of shared memory's regions, where tandem serve listens on loopback alone.
REGIONS_FOLDER = "TANDEM_REGIONS_FOLDER"
# Set where tandem serve listens on loopback alone: whoever calls is on this machine, or a proxy is.
ON_LOOPBACK = "TANDEM_ON_LOOPBACK"
# By it Gateways know what HAProxy sent. tandem serve makes one for each run; on a cluster it is the
# operator's. Other users cannot read a process's environment.
HAPROXY_SECRET = "TANDEM_HAPROXY_SECRET"
# Set after the fork server has started, and read when they are asked for, not when imported.
SET_LATE = (REGIONS_FOLDER, ON_LOOPBACK)
NICENESS = "RAY_worker_niceness"
RAY_ON_ALL_INTERFACES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
HAPROXY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
# A syslog server for a line of HAProxy's for each request; a user's own. Without it there is none.
HAPROXY_LOG = "RAY_SERVE_HAPROXY_LOG_TARGET"
HAPROXY_COMMAND = "haproxy"  # in the run's folder: the command that Serve starts
# How long HAProxy waits for a Gateway that has the whole request: longer than any that lives takes.
# It is our application's: what others wait for is theirs.
GATEWAY_TIMEOUT, GATEWAY_TIMEOUT_S = "TANDEM_GATEWAY_TIMEOUT_S", 5
UTF8 = "PYTHONUTF8"
HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
PROXY_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PREPARE_PROXY = "app.serve.replica:prepare_proxy"
DRAINING = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
BUFFER_BYTES = "RAY_SERVE_HAPROXY_TUNE_BUFSIZE"
# HAProxy's buffers. What fits in one, without HEADER_BYTES, is sent again when its Gateway dies.
OWN_BUFFER_BYTES, NODE_BUFFER_BYTES, HEADER_BYTES = 128 * KIB, MIB, 16 * KIB
# What HAProxy had under way when it was replaced; Serve's own default, which clusters have.
HARD_STOP_AFTER_S = 120


# What the service is not started without: each keeps a port to itself or bounds who comes.
PROTECTING = (
    *(RAY_ON_ALL_INTERFACES, HAPROXY_PATH, HA_PROXY),
    PROXY_CALLBACK,
    "RAY_SERVE_HAPROXY_MAXCONN",
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S",
)
# What Ray does several times a second, for clusters and a dashboard. On one machine at rest that is
# a sixth of all it costs (decision 0040); milliseconds.
AT_REST = {
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "1000",
    "RAY_kill_idle_workers_interval_ms": "1000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_task_events_report_interval_ms": "0",  # never: for the dashboard
    "RAY_event_stats": "0",
    # For its object store, which no request uses, and for its autoscaler.
    "RAY_local_fs_monitor_interval_ms": "5000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    # Ray's agent is told every 3 s, whatever the interval (app/launch/fork_client.py).
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    "REPORTER_UPDATE_INTERVAL_MS": "15000",  # the dashboard agent's look at all processes
}


def _fast_environment(haproxy: Path) -> dict[str, str]:
    """Return the environment that makes Ray Serve fast; needed before Ray starts.

    HAProxy as the ingress and Serve's throughput mode belong together (gRPC between deployments,
    user code on the replica's own loop). ``haproxy`` is the command that starts it.
    """
    return {
        HA_PROXY: "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # By default Serve looks at everything, and every process flushes its metrics, ten times a
        # second: most of what a service at rest costs (tests/load/startup.py).
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        # Throughput mode holds log lines back until there are a thousand; ours are few.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        # A decoded stack of 64 images at 224 px is 9.6 MB; a body may have max_body_bytes.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(128 * MIB),
        # Of Serve's own proxies: max_body_bytes as it is by default (app/settings), and as much
        # again as lets a client that is a little over it be told so by us. Gateways know theirs.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(21 * MIB),
        HAPROXY_PATH: str(haproxy),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # HAProxy would tell Serve of each request in a datagram, for counters that replicas keep
        # as well, and then do: 0.07 CPU-ms and a process woken for each (decision 0039).
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # A photo takes one read and write, not seven (decision 0049); 16 KiB by default.
        BUFFER_BYTES: str(OWN_BUFFER_BYTES),
        # A server that cannot be reached is skipped at once, until a check, every 0.25 s, succeeds.
        # With Serve's 3 a request's attempts are used up before (decision 0089).
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        # A Gateway that is silent or slow is left after two checks, each of so long at most: 5 s by
        # default. One machine's has 2 s (haproxy_cfg/http_backend.cfg): it may be a busy one.
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        # An HAProxy that died is found out by three of these, each in two of Serve's loops.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.1",
        # What a gRPC client sends before it waits for a word of HAProxy's: 64 KB by default, which
        # makes 1 MB/s of a connection with 50 ms to and fro.
        "RAY_SERVE_HAPROXY_H2_FE_INITIAL_WINDOW_SIZE": str(MIB),
        "RAY_USAGE_STATS_ENABLED": "0",
        UTF8: "1",  # HAProxy's file, which Serve writes as its locale says, has an arrow
        # Ray's default is nice 15 for its workers, replicas and HAProxy among them: a busy program
        # leaves them 3 % of a core, and proxies do not start in time (decision 0041).
        NICENESS: "0",
        # Ray's own handler aborts the process on SIGTERM; Python's faulthandler reports crashes.
        "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    }


def node_environment(haproxy: Path) -> dict[str, str]:
    """Return the environment of a cluster's node: Serve is fast, and loses nothing."""
    return _fast_environment(haproxy) | {
        # What a Gateway had when it died, or its node was cut off, goes to another: HAProxy's edits
        # say so for our application. What kills every Gateway it meets kills four.
        GATEWAY_TIMEOUT: environment_value(GATEWAY_TIMEOUT) or str(GATEWAY_TIMEOUT_S),
        "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "1",
        # HAProxy prefers idle servers, and a dead one looks idle. So allow two failed attempts per
        # node, which has two Gateways.
        "RAY_SERVE_HAPROXY_RETRIES": "3",
        BUFFER_BYTES: str(NODE_BUFFER_BYTES),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "30",  # silence in the middle of a body
        # How long a Gateway that is to end goes on, until each node's HAProxy has left it out: 30 s
        # by default, for a slow load balancer. Whom it refuses then, another Gateway answers.
        DRAINING: "2",
    }


def serve_environment(run_dir: Path, free_ports: tuple[int, int]) -> dict[str, str]:
    """Return the environment of a Ray of our own, on a machine that it may share.

    ``run_dir`` and ``free_ports`` (metrics, statistics) keep two services on one machine apart:
    HAProxy's files and ports are fixed otherwise.
    """
    return {
        **_fast_environment(run_dir / HAPROXY_COMMAND),
        **AT_REST,
        # Nobody joins it: let it listen on loopback alone, as Ray does on a Mac.
        RAY_ON_ALL_INTERFACES: "0",
        # Ray gives a node up whose answers are late five times, and with it all that runs there. On
        # one machine that is a busy one, and nobody else could go on.
        "RAY_health_check_failure_threshold": "100",
        # Called in proxies and replicas before they listen.
        PROXY_CALLBACK: PREPARE_PROXY,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(run_dir / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(run_dir / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(run_dir),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(run_dir / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(run_dir / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_ports[1]),
        # Serve starts a new HAProxy whenever replicas come or go, also a few seconds after the
        # service is ready; the one before ends what it has. What takes longer is cut off: more than
        # a request's time (request_timeout_s). At the end of a run Serve kills both at once.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(HARD_STOP_AFTER_S),
        # Ctrl-C on a laptop should not wait for a load balancer to notice.
        DRAINING: "1",
    }


def environment_value(*names: str) -> str | None:
    """Return the first of these variables that is set and not empty."""
    return next((value for name in names if (value := os.environ.get(name))), None)


def otlp_endpoint() -> str | None:
    """Return the address of a collector of traces that OpenTelemetry's variables name."""
    return environment_value("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def is_on_loopback() -> bool:
    """Tell whether ``tandem serve`` started this process, and listens on loopback alone."""
    return os.environ.get(ON_LOOPBACK) == "1"


def gateway_timeout_s() -> float | None:
    """Return how long this node's HAProxy waits for a Gateway; None where it waits for ever."""
    return float(os.environ.get(GATEWAY_TIMEOUT) or 0) or None


def has_haproxy() -> bool:
    """Tell whether Serve puts HAProxy in front; its own proxy has other options."""
    return os.environ.get(HA_PROXY) == "1"


def prepend_to_environment(name: str, value: str) -> None:
    """Put ``value`` in front of a comma-separated variable; of a repeated entry the last wins."""
    os.environ[name] = ",".join(part for part in (value, os.environ.get(name)) if part)


def add_import_path(folder: Path) -> None:
    """Let the Python processes that this one starts import from ``folder``, before all others.

    They work in other folders: what the user named relatively is made absolute, and an empty name,
    Python's for the working folder, goes.
    """
    before = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    rest = [path for path in map(os.path.abspath, before) if path != str(folder)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *rest])


def set_environment(values: Mapping[str, str], ours: Collection[str] = ()) -> None:
    """Put ``values`` into the environment; what the user set already wins, but for ``ours``."""
    for name, value in values.items():
        if name in ours:
            os.environ[name] = value
        os.environ.setdefault(name, value)


def remove_from_environment(name: str) -> None:
    """Take a variable away, if it is set."""
    os.environ.pop(name, None)


def whole_environment() -> dict[str, str]:
    """Return all of the environment."""
    return dict(os.environ)


def replace_environment(values: Mapping[str, str]) -> None:
    """Take this environment instead."""
    os.environ.clear()
    os.environ.update(values)


def mark_own_lines() -> None:
    """Give each record of this program's own code, in the log that it shares with Serve, a mark."""
    logging.getLogger("ray.serve").addFilter(_mark)


def _mark(record: logging.LogRecord) -> bool:
    if record.pathname.startswith(PROGRAM):
        record.tandem = True  # Ray's formatter writes all that it does not know
    return True


def write_to_stderr_as_to_files() -> None:
    """Write Serve's log to stderr, which pods of a cluster show, in the format of its files.

    Ray 2.60 writes text to stderr (``RAY_SERVE_LOG_TO_STDERR``), whatever ``logging_config`` says.
    """
    handlers = logging.getLogger("ray.serve").handlers
    files = [(h.target, h.filters) for h in handlers if isinstance(h, MemoryHandler) and h.target]
    for stream in handlers:
        if type(stream) is not logging.StreamHandler:
            continue
        for file, filters in files:
            stream.setFormatter(file.formatter)
            stream.filters = [*stream.filters, *(f for f in filters if f not in stream.filters)]
