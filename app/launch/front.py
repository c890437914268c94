"""What HAProxy does in Serve's place: TLS, the address that clients reach, and who they may be."""

from app.environment import has_haproxy
from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.haproxy.addresses import listening_on
from app.launch.haproxy.command import HaproxyCommand
from app.launch.http_options import Tls, tls_of
from app.oip.region_files import FOLDER

# Of Serve's own proxy: what HAProxy does beside handing requests on.
UNPROTECTED = (
    "without HAProxy (portable mode) nothing limits connections, slow headers or slow bodies, and "
    "overload is refused later: for this machine's own callers, on loopback"
)
GATEWAYS_HOST = "127.0.0.1"  # where HAProxy reaches them on one machine


def put_haproxy_in_front(
    config: ServeConfig, haproxy: HaproxyCommand, *, is_joining: bool
) -> ServeConfig:
    """Tell HAProxy what it does in Serve's place; return the configuration that is left to Serve.

    Raises:
        ConfigError: nobody would do the TLS that http_options ask for, or not for gRPC.

    """
    http, tls = config.http, tls_of(config.http)
    max_requests, origins = config.settings.max_concurrent_requests, config.settings.allowed_origins
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
    """Refuse TLS that Serve's own proxy, or a cluster's HAProxy, does not do."""
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
    """Return the warning about a service of this machine without HAProxy; None if there is one.

    Raises:
        ConfigError: others would reach it.

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
    """Raise :class:`ConfigError` if it is on, and callers need not be on this machine.

    A Gateway behind HAProxy sees HAProxy's address alone, for both protocols: what is known of
    callers is known by where HAProxy listens.
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
