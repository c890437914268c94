"""Configures HAProxy before Serve starts: TLS, the public address, and client certificates."""

from app.environment import has_haproxy
from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.haproxy.addresses import listening_on
from app.launch.haproxy.command import HaproxyCommand
from app.launch.http_options import Tls, tls_of
from app.oip.region_files import FOLDER

# Protections of HAProxy that Serve's own proxy lacks.
UNPROTECTED = (
    "without HAProxy (portable mode) nothing limits connections, slow headers or slow bodies, and "
    "overload is refused later: for this machine's own callers, on loopback"
)
GATEWAYS_HOST = "127.0.0.1"  # the address at which HAProxy on this machine reaches the Gateways


def put_haproxy_in_front(
    config: ServeConfig, haproxy: HaproxyCommand, *, is_joining: bool
) -> ServeConfig:
    """Configure HAProxy; return the configuration for Serve without HAProxy's part.

    Raises:
        ConfigError: http_options ask for TLS that neither HAProxy nor Serve would provide.

    """
    http, tls = config.http, tls_of(config.http)
    settings, origins = config.settings, config.settings.allowed_origins
    # With several sets the Gateway applies each set's limit; requests that it refuses count as
    # under way for a moment.
    max_requests = settings.max_concurrent_requests * len(settings.of_each_set())
    if is_joining or not has_haproxy():
        if tls is not None:
            _check_without_ours(config, tls)
        if has_haproxy():
            haproxy.write(max_requests=max_requests, application=config.name, origins=origins)
        return config
    is_moved = http.host != GATEWAYS_HOST
    moved = listening_on(http.host, http.port, config.grpc_port) if is_moved else []
    haproxy.write(tls, max_requests, moved, config.name, origins)
    return config.without_tls().with_http_options(host=GATEWAYS_HOST)


def _check_without_ours(config: ServeConfig, tls: Tls) -> None:
    """Refuse TLS options that Serve's own proxy, or a cluster's HAProxy, would ignore."""
    if has_haproxy():
        raise ConfigError(
            "http_options.ssl_... with --address: the HAProxy of a cluster's Serve does no TLS; "
            "put something that does in front, or start the cluster and this command with "
            "RAY_SERVE_ENABLE_HA_PROXY=0"
        )
    if tls.clients is not None:
        raise ConfigError(
            f"http_options.ssl_ca_certs ({tls.clients}) without HAProxy: Serve's own proxy lets in "
            "clients without a certificate all the same; leave it out, or use HAProxy"
        )
    if config.grpc_port is not None:
        raise ConfigError(
            "http_options.ssl_... and grpc_options without HAProxy: gRPC would go in clear, since "
            "Serve's own proxy does TLS for HTTP alone; leave one of them out"
        )


def check_unprotected(config: ServeConfig) -> str | None:
    """Return a warning if a local service runs without HAProxy, else None.

    Raises:
        ConfigError: other machines could reach the service.

    """
    if has_haproxy():
        return None
    if not config.http.is_on_loopback:
        raise ConfigError(
            f"http_options.host is {config.http.host}, and {UNPROTECTED}: use --host 127.0.0.1, "
            "or serve others from Linux with HAProxy (--no-portable)"
        )
    return UNPROTECTED


def check_shared_memory(config: ServeConfig, *, is_joining: bool) -> None:
    """Raise :class:`ConfigError` if shared memory is on and callers on other machines are possible.

    Behind HAProxy a Gateway sees only HAProxy's address, over HTTP and gRPC. So HAProxy's own
    address decides who can call.
    """
    if not config.settings.shared_memory:
        return
    if is_joining:
        raise ConfigError(
            "shared_memory with --address: a cluster's Gateways do not know on which machine "
            "a caller is; leave the setting out, or serve without --address"
        )
    if not FOLDER.is_dir():
        raise ConfigError(f"shared_memory is in {FOLDER}, and this system has none: leave it out")
    if not config.http.is_on_loopback:
        raise ConfigError(
            f"shared_memory is on, and the service listens on {config.http.host}: callers of other "
            "machines have no memory in common with it; use --host 127.0.0.1, or leave the setting "
            "out"
        )


def with_open_traffic(config: ServeConfig, *, is_joining: bool) -> ServeConfig:
    """Let callers on this machine change the traffic, unless the file says who may."""
    settings = config.settings
    if not settings.has_versions or settings.open_traffic is not None:
        return config
    return config.with_arguments(open_traffic=config.http.is_on_loopback and not is_joining)
