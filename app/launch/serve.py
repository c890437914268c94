"""``tandem serve``: checks the configuration, starts the service, waits, stops it."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from app.environment import has_haproxy
from app.errors import ConfigError
from app.launch.capacity import check_capacity, oversubscribed
from app.launch.deploy import deploy, wait_ready, wants_key
from app.launch.grpc_options import grpc_port, with_grpc
from app.launch.haproxy import HaproxyCommand
from app.launch.isolated_environment import fast_serve
from app.launch.ports import check_port, metrics_port
from app.launch.ray_cluster import MIN_CPUS, joined_ray, local_ray, metrics_urls
from app.launch.stop_request import StopRequest
from app.launch.tls import tls_of, without_tls
from models.cpus import available_cpus

console = Console(stderr=True, soft_wrap=True, highlight=False)
CONFIG_NAME = "serve_config.yaml"


@dataclass(frozen=True)
class ServeOptions:
    """What the command line asks for; None leaves the configuration's own."""

    model_set: str | None = None
    config: Path | None = None
    host: str | None = None
    port: int | None = None
    address: str | None = None  # of a running cluster; None starts a Ray of our own
    allow_unverified: bool = False
    metrics_port: int | None = None  # of a Ray of our own; None: the usual one, or else a free one
    api_keys_file: Path | None = None
    grpc_port: int | None = None


def run_service(options: ServeOptions) -> None:
    """Serve until a signal asks to stop."""
    with StopRequest() as stop, fast_serve() as haproxy:
        content = _checked_config(options)
        http = content["http_options"]
        host = "127.0.0.1" if http["host"] == "0.0.0.0" else http["host"]
        url = f"{_front(content, options, haproxy)}://{host}:{http['port']}"
        with console.status("starting Ray") as status, _ray(options, content):
            deploy(content)
            if wait_ready(url, stop, lambda text: status.update(escape(text))):
                status.stop()
                _welcome(url, http["host"], grpc_port(content))
                stop.wait()
            status.stop()
            console.print("stopping")
    console.print("stopped; nothing of it is left running")


def _front(content: dict[str, Any], options: ServeOptions, haproxy: HaproxyCommand) -> str:
    """Tell HAProxy what it does in Serve's place; return the scheme that clients speak.

    That is https if http_options ask for TLS.
    """
    from app.settings import Settings

    settings = Settings.model_validate(content["applications"][0]["args"])
    haproxy.write(max_requests=settings.max_concurrent_requests)
    tls = tls_of(content["http_options"])
    if tls is None:
        return "http"
    if has_haproxy():
        if options.address is not None:
            raise ConfigError(
                "http_options.ssl_... with --address: the HAProxy of a cluster's Serve does no "
                "TLS; put something that does in front, or start the cluster and this command "
                "with RAY_SERVE_ENABLE_HA_PROXY=0"
            )
        haproxy.write(tls, settings.max_concurrent_requests)
        content["http_options"] = without_tls(content["http_options"])
    elif grpc_port(content) is not None:
        raise ConfigError(
            "http_options.ssl_... and grpc_options without HAProxy: gRPC would go in clear, since "
            "Serve's own proxy does TLS for HTTP alone; leave one of them out"
        )
    return "https"


def _ray(options: ServeOptions, content: dict[str, Any]) -> AbstractContextManager[None]:
    if options.address is None:
        return local_ray(metrics_port(options.metrics_port))
    names = [application.get("name", "default") for application in content["applications"]]
    return joined_ray(options.address, names)


def default_config() -> Path:
    """Return the folder's own serve_config.yaml, or else the project's."""
    here = Path(CONFIG_NAME)
    return here if here.is_file() else Path(__file__).parents[2] / CONFIG_NAME


def _checked_config(options: ServeOptions) -> dict[str, Any]:
    """Return the configuration to deploy; every mistake is found before Ray starts."""
    from app.accuracy_gate import check_accuracy
    from app.graph.keys import read_keys
    from app.launch.config import for_members, read_config, with_overrides
    from app.settings import Settings
    from models.model_set import load_model_set

    content = read_config(options.config or default_config())
    content = with_overrides(content, options.model_set, options.host, options.port)
    content = with_grpc(content, options.grpc_port)
    if options.address is None:  # a cluster that serves already has the ports, and may keep them
        _check_ports(content)
    arguments = content["applications"][0].setdefault("args", {})
    if options.allow_unverified:
        arguments["allow_unverified"] = True
    if options.api_keys_file is not None:
        arguments["api_keys_file"] = str(options.api_keys_file)
    settings = Settings.model_validate(arguments)
    if settings.api_keys_file is not None:
        arguments["api_keys_file"] = str(settings.api_keys_file.absolute())
    if options.address is None:  # on a cluster its nodes have the keys
        read_keys(settings)
    model_set = load_model_set(settings.model_set, settings.model_search)
    _ = model_set.labels  # reading it and finding the networks compares the files' hashes
    for member in model_set.manifest.members:
        model_set.network_path(member.name, settings.precision)
    verdict = check_accuracy(model_set.manifest, settings)
    if verdict.status != "verified":
        console.print(f"[yellow]{escape(verdict.message)}[/]")
    content = for_members(content, model_set.manifest)
    if options.address is None:
        check_capacity(content, max(MIN_CPUS, available_cpus()))
    if warning := oversubscribed(content):
        console.print(f"[yellow]{escape(warning)}[/]")
    return content


def _check_ports(content: dict[str, Any]) -> None:
    host = content["http_options"]["host"]  # HAProxy's, for both
    check_port(host, content["http_options"]["port"])
    if (port := grpc_port(content)) is not None:
        check_port(host, port, "--grpc-port")


def _welcome(url: str, host: str, grpc: int | None) -> None:
    console.print(f"[bold green]ready[/] at [bold]{url}[/] (the page), {url}/docs (the interface)")
    has_keys = wants_key(url)
    key = '-H "Authorization: Bearer $TANDEM_API_KEY" ' if has_keys else ""
    console.print(f"  curl {key}--data-binary @photo.jpg {url}/v1/classify")
    if grpc is not None:
        where = "127.0.0.1" if host == "0.0.0.0" else host
        console.print(f"gRPC: {where}:{grpc}, tandem.v1.Ensemble (app/grpc/tandem.proto)")
    console.print(f"metrics: {', '.join(metrics_urls())}")
    if host not in ("127.0.0.1", "::1", "localhost"):
        console.print(f"[yellow]{_exposure(host, has_keys, url)}[/]")
    console.print("Ctrl-C stops it.")


def _exposure(host: str, has_keys: bool, url: str) -> str:
    """Say who can call a service that does not listen on loopback, and what they can read."""
    text = f"listening on {host}: every machine that reaches this one may call"
    text += " with a key" if has_keys else "; --api-keys-file lets in only those with a key"
    if not url.startswith("https:"):
        text += "; what is sent can be read on the way (http_options.ssl_certfile encrypts it)"
    return text
