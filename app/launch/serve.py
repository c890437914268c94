"""The run of ``tandem serve``: checks the configuration, starts the service, waits, stops it.

OpenTelemetry raises when it reads an unusable variable, at import, in every process of Ray's, even
without tracing. A tracing error must not keep the service from starting, so these variables are
removed. Without a collector tracing is off.
"""

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points, version
from pathlib import Path

from rich.markup import escape
from rich.status import Status
from rich.text import Text

from app.access import KeyFile, Keys, read_key_file, read_keys
from app.environment import (
    ON_LOOPBACK,
    environment_value,
    has_haproxy,
    otlp_endpoint,
    remove_from_environment,
    set_environment,
)
from app.errors import ConfigError, ServiceEndedError
from app.launch import checks, supervisor
from app.launch.config import EXPORTER, ServeConfig
from app.launch.deploy import (
    client_of,
    deploy,
    deployed_beside_others,
    grpc_reaches,
    wait_ready,
    wants_key,
)
from app.launch.fork_client import METRICS_SOCKET
from app.launch.forks import ForkServerProcess, fork_server
from app.launch.haproxy import (
    CertificateRenewal,
    HaproxyCommand,
    check_shared_memory,
    check_unprotected,
    put_haproxy_in_front,
    with_open_traffic,
)
from app.launch.log_and_metrics import (
    console,
    followed,
    logger,
    metrics_relay,
    service_log,
    take_over_rays_lines,
)
from app.launch.ray_cluster import (
    LOCAL,
    MIN_CPUS,
    StopRequest,
    check_address,
    check_processes,
    has_starting_replica,
    joined_ray,
    local_ray,
    metrics_urls,
    raise_file_limit,
    stop_signals,
)
from app.launch.ray_features import check_installed_ray, metrics_are_on_socket
from app.launch.run_folder import LOGS, RAY, fast_serve, make_regions_folder
from app.launch.serve_options import (
    OPTIONS,
    ServeOptions,
    read_config,
    unknown_variables,
    with_usable_paths,
)
from app.setting_values import check_redis_client
from app.settings import Settings
from app.stages.threads import memory_left
from models.image_colors import check_can_convert
from models.machine import DISTRIBUTION, available_cpus, give_back_memory
from models.model_set import ModelSet

_warn = logger.warning
LOOPBACK = "127.0.0.1"
Reason = str | None  # why a value cannot be used
REMEDIES = {  # by the propagator's name
    **dict.fromkeys(("b3", "b3multi"), "pip install 'tandem-serve[b3]'"),
    "xray": "pip install 'tandem-serve[xray]'",
    "datadog": "OpenTelemetry's package for it ended in 2022 and fits no SDK of today; Datadog's "
    "tracers send traceparent too (DD_TRACE_PROPAGATION_STYLE=datadog,tracecontext, the default)",
}


def run_service(options: ServeOptions, flags: Collection[str] = OPTIONS) -> None:
    """Serve until a signal asks to stop; print the progress on stderr.

    ``flags`` are the options given as flags; the others come from variables.
    """
    with service_log(options.log_format, options.log_level) as log_format:
        try:
            _run(replace(options, log_format=log_format), flags)
        except ServiceEndedError as error:
            text = f"tandem serve ends: {error.message}; all of it was stopped, start it again"
            text = ". ".join((text, *getattr(error, "__notes__", ())))
            logger.critical(text, extra={"fields": {"code": error.code}})
            os._exit(1)  # Ray's library would wait for its own processes, which are dead


def _run(options: ServeOptions, flags: Collection[str]) -> None:
    if options.address == LOCAL:  # Ray's own name for a Ray that is started
        options = replace(options, address=None)
    is_joining = options.address is not None
    is_portable = sys.platform != "linux" if options.portable is None else options.portable
    supervisor.adopt_orphans()
    noted = _noted()
    with (
        stop_signals() as stop,
        fast_serve(is_joining=is_joining, is_portable=is_portable) as haproxy,
        nullcontext() if is_joining or is_portable else fork_server(haproxy.path.parent) as forks,
    ):
        logs = None if is_joining else str(haproxy.path.parent / RAY / "session_latest" / LOGS)
        about = {"version": version(DISTRIBUTION), "logs_of_ray": logs}
        logger.info("starting", extra={"fields": about})
        _warn_of_ray(noted, is_joining=is_joining)
        if options.log_format == "json":
            take_over_rays_lines()
        config = _checked_config(options, flags)
        if options.metrics_key_file is not None and metrics_are_on_socket(forks):
            config = config.changed(key_names_in_metrics=True)
        behind_haproxy = put_haproxy_in_front(config, haproxy, is_joining=is_joining)
        make_regions_folder(config, haproxy.path.parent)
        is_local = config.http.is_on_loopback and not is_joining
        set_environment({ON_LOOPBACK: str(int(is_local))}, ours=(ON_LOOPBACK,))
        titles: dict[int, str] = {}
        ray = _ray(options, config, forks, haproxy.path.parent, titles)
        progress = console.status("starting Ray", spinner="line")  # ASCII
        with progress as status, ray as metrics, ExitStack() as stack:
            stack.enter_context(followed(haproxy.path.parent / RAY))  # with a cluster: no files
            processes = None if is_joining else supervisor.Processes(titles, _warn)
            with haproxy.check_started_on_error():
                if is_joining:
                    asked, config = config, stack.enter_context(deployed_beside_others(config))
                    if asked.http != config.http or asked.grpc_port != config.grpc_port:
                        _warn(f"the options of the cluster's own Serve hold: {config.url} answers")
                else:
                    deploy(behind_haproxy)
            is_ours = has_haproxy() and not is_joining
            if _is_ready(config, haproxy, stop, status, metrics, processes, is_ours=is_ours):
                give_back_memory()  # from here on the process only waits
                if processes is not None:
                    readiness = _readiness(config, haproxy, is_ours=is_ours)
                    supervisor.supervise(stop, processes, readiness, haproxy)
                stop.wait()
            with suppress(OSError):  # the terminal was closed
                status.stop()
            supervisor.notify_systemd("STOPPING=1")
            _say("stopping")
    _say("stopped; nothing of it is left running")


@contextmanager
def checked_start(options: ServeOptions, flags: Collection[str]) -> Iterator[ServeConfig]:
    """Make the checks of a start without starting anything; yield the configuration.

    Warnings are logged, as by :func:`run_service`. Left-overs of killed runs are removed.

    Raises:
        TandemError: ``tandem serve`` would not start with these options.
    """
    is_joining = options.address not in (None, LOCAL)
    is_portable = sys.platform != "linux" if options.portable is None else options.portable
    noted = _noted()
    with fast_serve(is_joining=is_joining, is_portable=is_portable) as haproxy:
        _warn_of_ray(noted, is_joining=is_joining)
        if is_joining:
            check_address(str(options.address))
        else:
            options = replace(options, address=None)
        config = _checked_config(options, flags)
        put_haproxy_in_front(config, haproxy, is_joining=is_joining)
        yield config


def _noted() -> list[str]:
    """Set the process's limits; return a line for each variable that cannot be used."""
    raise_file_limit()
    return [*leave_out_unusable(), *unknown_variables()]


def _warn_of_ray(noted: Sequence[str], *, is_joining: bool) -> None:
    for line in (*noted, *check_installed_ray(is_joining=is_joining)):
        _warn(line)


def _is_ready(
    config: ServeConfig,
    haproxy: HaproxyCommand,
    stop: StopRequest,
    status: Status,
    metrics: list[str],
    processes: supervisor.Processes | None,
    *,
    is_ours: bool,
) -> bool:
    """Wait for the service and welcome the user; return False if asked to stop meanwhile.

    ``is_ours``: HAProxy is this run's, so it listens on the sockets of the run's folder.
    """

    def report(progress: str) -> None:
        haproxy.check_started()
        if processes is not None:
            processes.look(stop, 0)
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
            supervisor.notify_systemd("READY=1")
    return is_ready


def _readiness(
    config: ServeConfig, haproxy: HaproxyCommand, *, is_ours: bool
) -> supervisor.Readiness:
    """Return what asks the service; with TLS it also looks whether the certificate was renewed."""
    client = client_of(config.url, haproxy.local_socket if is_ours else None)
    renewal = CertificateRenewal(config.http, haproxy.path.parent, _warn)

    def ask() -> str:
        if is_ours and config.http.scheme == "https":
            renewal.look()
        return supervisor.ask_of(client)

    return supervisor.Readiness(ask, has_starting_replica)


@contextmanager
def _ray(
    options: ServeOptions,
    config: ServeConfig,
    forks: ForkServerProcess | None,
    run_dir: Path,
    titles: dict[int, str],
) -> Iterator[list[str]]:
    """Start Ray or join a running one; yield the URLs of the metrics for Prometheus."""
    if options.address is not None:
        with joined_ray(options.address):
            yield metrics_urls()
        return
    host, of_ray, keys = (
        options.metrics_host or LOOPBACK,
        checks.free_port(),
        options.metrics_key_file,
    )
    port = options.metrics_port or checks.METRICS_PORT
    if options.metrics_host is None:
        port = checks.metrics_port(options.metrics_port, (config.http.port, config.grpc_port))
    source = run_dir / METRICS_SOCKET if metrics_are_on_socket(forks) else of_ray
    with (
        metrics_relay(
            host, port, source, Keys((), KeyFile(keys.absolute()) if keys else None)
        ) as url,
        local_ray(of_ray, forks, run_dir / RAY, _warn, titles),
    ):
        yield [url]


def _checked_config(options: ServeOptions, flags: Collection[str] = OPTIONS) -> ServeConfig:
    """Return the configuration to deploy; finds every mistake before Ray starts."""
    # These import OpenTelemetry and Ray, which read their environment when they are imported.
    from app.graph.served_models import decided
    from app.traffic.control import accuracy_warnings, loaded_sets

    config = read_config(options, flags)
    _check_metrics_key(options)
    if options.address is None:  # on a cluster that already serves, the ports may be in use
        _check_ports(config, options)
        read_keys(config.settings.api_keys_file)  # on a cluster the nodes have the key files
    check_shared_memory(config, is_joining=options.address is not None)
    config = with_open_traffic(config, is_joining=options.address is not None)
    settings = config.settings
    check_redis_client(settings.cache)
    check_can_convert(settings.icc_profiles)
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
        served, num_sizes = settings.served_precision, len(set(settings.batch_sizes))
        networks = {}  # bytes of memory of each set's, or each version's
        for of in model_sets:
            name = f"{of.name}@{of.fingerprint(served)}" if settings.has_versions else of.name
            networks[name] = sum(of.memory_needed(served, num_sizes).values())
        checks.check_memory(deployments, networks, memory_left(at_most=True))
        config = without_unsent_traces(config)  # on a cluster the nodes have the variables
        config, warning = with_usable_paths(config)
        if warning is not None:
            _warn(warning)
    if crowded := checks.oversubscribed(config.deployments):
        _warn(crowded)
    return config


def _check_metrics_key(options: ServeOptions) -> None:
    if options.metrics_key_file is not None:
        read_key_file(options.metrics_key_file)
        if options.address is not None:
            raise ConfigError(
                "--metrics-key-file with --address: a cluster's nodes show their metrics without a "
                "key; leave it out, and close the port (ray start --metrics-export-port) to others"
            )


def _check_set(model_set: ModelSet, settings: Settings) -> None:
    """Refuse a set with a modified file, or a set that does not fit the settings."""
    from app.graph.served_models import check_plan
    from app.stages.own_functions import check_functions

    _ = model_set.labels  # reading the labels and finding the networks compares the files' hashes
    for member in model_set.manifest.members:
        model_set.network_path(member.name, settings.served_precision)
    check_plan(settings, model_set)
    check_functions(settings, model_set.manifest)


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
    if kind == "propagator" and name in REMEDIES:
        return f"no {kind} {name!r} is installed: {REMEDIES[name]}"
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
    "PYTHONOPTIMIZE": lambda _: "Ray's processes do not start without docstrings",
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
