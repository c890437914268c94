"""The run of ``tandem serve``: checks the configuration, starts the service, waits, stops it.

It also tells systemd the service's state (sd_notify), and relays metrics from Ray's agent on
loopback to an address that other machines reach.

OpenTelemetry raises when it reads an unusable variable, at import, in every process of Ray's, even
without tracing. A tracing error must not keep the service from starting, so these variables are
removed. Without a collector tracing is off.
"""

import contextlib
import re
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points, version
from pathlib import Path

import httpx
from rich.markup import escape
from rich.status import Status
from rich.text import Text

from app.access import read_keys
from app.environment import (
    ON_LOOPBACK,
    environment_value,
    has_haproxy,
    otlp_endpoint,
    remove_from_environment,
    set_environment,
)
from app.launch import checks
from app.launch.config import EXPORTER, ServeConfig
from app.launch.deploy import (
    client_of,
    deploy,
    deployed_beside_others,
    grpc_reaches,
    wait_ready,
    wants_key,
)
from app.launch.forks import ForkServerProcess, fork_server
from app.launch.haproxy import (
    RENEWAL_EVERY_S,
    CertificateRenewal,
    HaproxyCommand,
    check_shared_memory,
    check_unprotected,
    put_haproxy_in_front,
    with_open_traffic,
)
from app.launch.log import console, followed, logger, service_log, take_over_rays_lines
from app.launch.ray_cluster import (
    LOCAL,
    MIN_CPUS,
    StopRequest,
    check_processes,
    joined_ray,
    local_ray,
    metrics_urls,
    stop_signals,
)
from app.launch.ray_features import check_installed_ray
from app.launch.run_folder import RAY, fast_serve, make_regions_folder
from app.launch.serve_options import (
    OPTIONS,
    ServeOptions,
    read_config,
    unknown_variables,
    with_usable_paths,
)
from app.setting_values import check_redis_client
from app.settings import Settings
from models.machine import DISTRIBUTION, available_cpus, give_back_memory
from models.model_set import ModelSet

SOCKET_VARIABLE = "NOTIFY_SOCKET"
Reason = str | None  # why a value cannot be used
METRICS_PATH = "/metrics"
MAX_CONNECTIONS = 8  # enough for two Prometheus servers and some people
TIMEOUT_S = 10.0  # the default of Prometheus


def run_service(options: ServeOptions, flags: Collection[str] = OPTIONS) -> None:
    """Serve until a signal asks to stop; print the progress on stderr.

    ``flags`` are the options given as flags; the others come from variables.
    """
    with service_log(options.log_format) as log_format:
        _run(replace(options, log_format=log_format), flags)


def _run(options: ServeOptions, flags: Collection[str]) -> None:
    if options.address == LOCAL:  # Ray's own name for a Ray that is started
        options = replace(options, address=None)
    is_joining = options.address is not None
    is_portable = sys.platform != "linux" if options.portable is None else options.portable
    logger.info("starting", extra={"fields": {"version": version(DISTRIBUTION)}})
    for line in (*leave_out_unusable(), *unknown_variables()):
        _warn(line)
    with (
        stop_signals() as stop,
        fast_serve(is_joining=is_joining, is_portable=is_portable) as haproxy,
        nullcontext() if is_joining or is_portable else fork_server(haproxy.path.parent) as forks,
    ):
        for warning in check_installed_ray(is_joining=is_joining):
            _warn(warning)
        if options.log_format == "json":
            take_over_rays_lines()
        config = _checked_config(options, flags)
        behind_haproxy = put_haproxy_in_front(config, haproxy, is_joining=is_joining)
        make_regions_folder(config, haproxy.path.parent)
        is_local = config.http.is_on_loopback and not is_joining
        set_environment({ON_LOOPBACK: str(int(is_local))}, ours=(ON_LOOPBACK,))
        ray = _ray(options, config, forks, haproxy.path.parent)
        with console.status("starting Ray") as status, ray as metrics, ExitStack() as stack:
            stack.enter_context(followed(haproxy.path.parent / RAY))  # with a cluster: no files
            with haproxy.check_started_on_error():
                if is_joining:
                    stack.enter_context(deployed_beside_others(behind_haproxy))
                else:
                    deploy(behind_haproxy)
            is_ours = has_haproxy() and not is_joining
            if _is_ready(config, haproxy, stop, status, metrics, is_ours=is_ours):
                give_back_memory()  # from here on the process only waits
                renewal = CertificateRenewal(config.http, haproxy.path.parent, _warn)
                has_tls = is_ours and config.http.scheme == "https"
                while not stop.wait(RENEWAL_EVERY_S if has_tls else None):
                    renewal.look()
            with suppress(OSError):  # the terminal was closed
                status.stop()
            notify_systemd("STOPPING=1")
            _say("stopping")
    _say("stopped; nothing of it is left running")


def _is_ready(
    config: ServeConfig,
    haproxy: HaproxyCommand,
    stop: StopRequest,
    status: Status,
    metrics: list[str],
    *,
    is_ours: bool,
) -> bool:
    """Wait for the service and welcome the user; return False if asked to stop meanwhile.

    ``is_ours``: HAProxy is this run's, so it listens on the sockets of the run's folder.
    """

    def report(progress: str) -> None:
        haproxy.check_started()
        status.update(Text(progress))  # of a str rich takes brackets and ":a:" as markup

    grpc: Callable[[], bool] | None = None
    if config.grpc_port is not None:
        address = config.http.address(config.grpc_port)
        target = f"unix:{haproxy.local_grpc_socket}" if is_ours else address
        grpc = partial(grpc_reaches, target, config.name)
    with client_of(config.url, haproxy.local_socket if is_ours else None) as client:
        names = config.application_names
        if is_ready := wait_ready(client, stop, report, applications=names, grpc=grpc):
            status.stop()
            _welcome(config, metrics, has_keys=wants_key(client))
            notify_systemd("READY=1")
    return is_ready


@contextmanager
def _ray(
    options: ServeOptions, config: ServeConfig, forks: ForkServerProcess | None, run_dir: Path
) -> Iterator[list[str]]:
    """Start Ray or join a running one; yield the URLs of the metrics for Prometheus."""
    if options.address is not None:
        with joined_ray(options.address):
            yield metrics_urls()
        return
    if options.metrics_host is None:
        port = checks.metrics_port(options.metrics_port, (config.http.port, config.grpc_port))
        with local_ray(port, forks, run_dir / RAY, _warn):
            yield metrics_urls()
        return
    port, of_ray = options.metrics_port or checks.METRICS_PORT, checks.free_port()
    with (
        metrics_relay(options.metrics_host, port, of_ray) as url,
        local_ray(of_ray, forks, run_dir / RAY, _warn),
    ):
        yield [url]


def _checked_config(options: ServeOptions, flags: Collection[str] = OPTIONS) -> ServeConfig:
    """Return the configuration to deploy; finds every mistake before Ray starts."""
    # These import OpenTelemetry and Ray, which read their environment when they are imported.
    from app.graph.set_checks import decided
    from app.traffic.control import accuracy_warnings, loaded_sets

    config = read_config(options, flags)
    if options.address is None:  # on a cluster that already serves, the ports may be in use
        _check_ports(config, options)
        read_keys(config.settings.api_keys_file)  # on a cluster the nodes have the key files
    check_shared_memory(config, is_joining=options.address is not None)
    config = with_open_traffic(config, is_joining=options.address is not None)
    settings = config.settings
    check_redis_client(settings.cache)
    model_sets = loaded_sets(settings)
    if settings.precision == "auto" and options.address is None:  # on a cluster each node decides
        settings, warning = decided(settings, *model_sets)
        if warning is not None:
            _warn(warning)
        config = config.changed(precision=settings.precision)
    for model_set in model_sets:
        _check_set(model_set, settings)
    for warning in accuracy_warnings(settings, model_sets):
        _warn(warning)
    manifest = model_sets[0].manifest  # members are deployments only if there is a single set
    config = config.fitted_to(manifest)
    if options.address is None:
        deployments = config.all_deployments(manifest)
        checks.check_capacity(deployments, max(MIN_CPUS, available_cpus()))
        check_processes()
        config = without_unsent_traces(config)  # on a cluster the nodes have the variables
        config, warning = with_usable_paths(config)
        if warning is not None:
            _warn(warning)
    if crowded := checks.oversubscribed(config.deployments):
        _warn(crowded)
    return config


def _check_set(model_set: ModelSet, settings: Settings) -> None:
    """Refuse a set with a modified file, or a set that does not fit the settings."""
    from app.graph.set_checks import check_plan
    from app.stages.own_functions import check_functions

    _ = model_set.labels  # reading the labels and finding the networks compares the files' hashes
    for member in model_set.manifest.members:
        model_set.network_path(member.name, settings.served_precision)
    check_plan(settings, model_set)
    check_functions(settings, model_set.manifest)


def _warn(text: str) -> None:
    logger.warning(text)


def _say(text: str) -> None:
    logger.info(text)
    with suppress(OSError):  # the terminal was closed
        console.print(text)


def _check_ports(config: ServeConfig, options: ServeOptions) -> None:
    if (warning := check_unprotected(config)) is not None:
        _warn(warning)
    ports = {"http_options.port": config.http.port, "the port of gRPC": config.grpc_port}
    metrics = options.metrics_port
    if options.metrics_host is not None:  # never a free one: whoever scrapes it must know it
        metrics = metrics or checks.METRICS_PORT
        checks.check_host(options.metrics_host, "--metrics-host")
        checks.check_port(options.metrics_host, metrics, "--metrics-port")
    checks.check_distinct(ports | {"--metrics-port": metrics})
    host = config.http.host  # the address of HAProxy, for both ports
    checks.check_port(host, config.http.port)
    if config.grpc_port is not None:
        checks.check_port(host, config.grpc_port, "--grpc-port")


def _welcome(config: ServeConfig, metrics: list[str], *, has_keys: bool) -> None:
    url, http = config.url, config.http
    page = f"{url}/" if config.route_prefix != "/" else url
    fields = {"url": url, "grpc_port": config.grpc_port, "metrics": metrics}
    settings = config.settings
    version = settings.load_set().fingerprint(settings.served_precision)
    fields |= {"model_set": settings.model_set, "model_version": version}
    logger.info("ready at %s", page, extra={"fields": fields})
    shown = f"[bold]{escape(page)}[/] (the page), {escape(url)}/docs (the interface)"
    console.print(f"[bold green]ready[/] at {shown}")
    key = '-H "Authorization: Bearer $TANDEM_API_KEY" ' if has_keys else ""
    if http.ssl_ca_certs:
        key = f"--cert CLIENT.pem --key CLIENT.key {key}"
    console.print(f"  curl {key}--data-binary @photo.jpg {url}/v1/classify", markup=False)
    if config.grpc_port is not None:
        where = http.address(config.grpc_port)
        console.print(f"gRPC: {where}, tandem.v1.Ensemble (app/grpc/tandem.proto)", markup=False)
    console.print(f"metrics: {', '.join(metrics)}", markup=False)
    if not http.is_on_loopback:
        _warn(_exposure(http.host, has_keys, url))
    console.print("Ctrl-C stops it.")


def _exposure(host: str, has_keys: bool, url: str) -> str:
    """Return a warning on who can call a service beyond loopback, and what they can read."""
    text = f"listening on {host}: every machine that reaches this one may call"
    text += " with a key" if has_keys else "; --api-keys-file lets in only those with a key"
    if not url.startswith("https:"):
        text += "; others can read it on the way (http_options.ssl_certfile encrypts it)"
    return text


def notify_systemd(state: str) -> None:
    """Send a state like ``READY=1`` if systemd waits for it (``Type=notify``); else do nothing.

    Failures need no report: systemd ends a service that is not ready within ``TimeoutStartSec``.
    """
    if address := environment_value(SOCKET_VARIABLE):
        name = f"\0{address[1:]}" if address.startswith("@") else address  # Linux's abstract socket
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to_systemd,
        ):
            to_systemd.connect(name)
            to_systemd.sendall(state.encode())


def leave_out_unusable() -> list[str]:
    """Remove variables with unusable values from the environment; return a line for each.

    Empty variables are removed without a line: they count as not set, but OpenTelemetry would
    raise.
    """
    lines = []
    for name, check in CHECKS.items():
        value = environment_value(name)
        reason = None if value is None else check(value)
        if value is None or reason is not None:
            remove_from_environment(name)
        if reason is not None:
            lines.append(f"{name}={value} is left out: {reason}")
    return lines


def without_unsent_traces(config: ServeConfig) -> ServeConfig:
    """Switch tracing off if the settings send spans nowhere: Serve would make and drop them."""
    exporter = config.settings.trace_exporter
    has_address = bool(config.settings.trace_endpoint or otlp_endpoint())
    is_sent = exporter == "jaeger" or (exporter == "otlp" and has_address)
    tracing = config.content.get("tracing_config") or {}
    is_ours = tracing.get("enabled") and tracing.get("exporter_import_path") == EXPORTER
    if is_sent or not is_ours:
        return config
    return replace(config, content=config.as_dict() | {"tracing_config": {"enabled": False}})


def _propagators(value: str) -> Reason:
    names = sorted({name.strip() for name in value.split(",")} - {"none"})
    return next(filter(None, (_installed("propagator", name) for name in names)), None)


def _installed(kind: str, name: str) -> Reason:
    known = entry_points(group=f"opentelemetry_{kind}").names
    if name in known:
        return None
    return f"no {kind} {name!r} is installed, but {', '.join(sorted(known))}"


def _seconds(value: str) -> Reason:
    try:
        float(value)
    except ValueError:
        return "a number of seconds is wanted, without a unit"
    return None


def _matches(value: str, pattern: str, wanted: str) -> Reason:
    is_one = re.fullmatch(pattern, value.strip(), re.ASCII | re.IGNORECASE)
    return None if is_one else f"{wanted} is wanted"


_limit = partial(_matches, pattern=r"[0-9]+", wanted="a whole number")
_compression = partial(_matches, pattern="gzip|deflate|none", wanted="gzip or deflate or none")
_protocol = partial(_matches, pattern="grpc|http/protobuf", wanted="grpc or http/protobuf")
CHECKS: dict[str, Callable[[str], Reason]] = {
    "OTEL_PROPAGATORS": _propagators,
    "OTEL_PYTHON_CONTEXT": partial(_installed, "context"),
    "OTEL_ATTRIBUTE_COUNT_LIMIT": _limit,
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": _limit,
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": _limit,
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT": _limit,
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": _limit,
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": _limit,
    "OTEL_SPAN_EVENT_COUNT_LIMIT": _limit,
    "OTEL_SPAN_LINK_COUNT_LIMIT": _limit,
    "OTEL_EXPORTER_OTLP_TIMEOUT": _seconds,
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": _seconds,
    "OTEL_EXPORTER_OTLP_COMPRESSION": _compression,
    "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": _compression,
    "OTEL_EXPORTER_OTLP_PROTOCOL": _protocol,
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": _protocol,
}


class _Server(ThreadingHTTPServer):
    """Serves ``MAX_CONNECTIONS`` at a time, and closes further connections."""

    daemon_threads = True

    def __init__(self, host: str, port: int, source: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.source = source
        self.places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a client that hangs up is no matter for the log."""


class _Handler(BaseHTTPRequestHandler):
    timeout = TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        if self.server.places.acquire(blocking=False):
            try:
                super().handle()
            finally:
                self.server.places.release()

    def do_GET(self) -> None:
        if self.path != METRICS_PATH:
            text = f"only {METRICS_PATH} is here\n"
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", text.encode())
            return
        try:
            source = httpx.get(self.server.source, timeout=TIMEOUT_S, trust_env=False)
            source.raise_for_status()
        except httpx.HTTPError as error:
            text = f"no metrics from {self.server.source}: {error}\n"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", text.encode())
        else:
            self._answer(HTTPStatus.OK, source.headers["content-type"], source.content)

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing, since scrapes come every few seconds."""


@contextlib.contextmanager
def metrics_relay(host: str, port: int, source_port: int) -> Iterator[str]:
    """Relay ``GET /metrics`` of ``host:port`` to ``source_port`` on loopback; yield the address.

    Raises:
        OSError: the process cannot listen on ``host:port``.

    """
    with _Server(host, port, f"http://127.0.0.1:{source_port}{METRICS_PATH}") as server:
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        try:
            yield f"http://{checks.joined(host, port)}{METRICS_PATH}"
        finally:
            server.shutdown()
            thread.join()
