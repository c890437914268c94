"""Refuses, before Ray starts, configurations that Serve accepts but this service cannot run with.

The checks cover deployments, ``http_options`` with address and TLS, and TCP ports: that a port is
free, and who uses it. They raise :class:`ConfigError`, which has the offending values and a remedy.
"""

import contextlib
import errno
import ipaddress
import random
import re
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, field_validator

from app.access import no_passphrase, reason
from app.errors import ConfigError
from app.setting_groups import LimitSettings
from app.setting_values import QueueConfig

IMPORT_PATH = "app.main:build"  # of our application; a file may have other applications too
SERVE_DEFAULT_GRACE_S = 20.0  # graceful_shutdown_timeout_s of a deployment that sets none
SERVE_DEFAULT_CPUS = 1.0  # num_cpus of a deployment that sets none
ALL_CORES = ("Gateway",)  # with less than one CPU, these use every core of the machine
# Deployments of one replica, without a CPU by default.
HUBS = ("Feedback", "Samples", "Traffic", "Sets")
WITHOUT_USER_CONFIG = WITHOUT_NETWORKS = ("Decoder", "Combiner", *HUBS)
# PSS of a service with tiny networks, without the 70 MiB that tandem serve gives back once it is
# ready.
RAY_BYTES = 310 * 2**20  # of all processes but the replicas
REPLICA_BYTES = 120 * 2**20  # of each replica, without its networks
SSL_FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
SSL_OPTIONS = (*SSL_FILES, "ssl_keyfile_password")
CHAIN = "tls.pem"  # the certificate's file name in the run's folder
REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # how this machine reaches all interfaces
HOST = re.compile(r"[0-9A-Za-z.:_-]+")  # an address or a name
METRICS_PORT = 9464  # OpenTelemetry's default for Prometheus scrapes
LOCAL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
OF_REPLICAS = range(30_000, 31_001)  # RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT to MAX, ascending
_given: set[int] = set()
_reserved: set[int] = set()  # until this process ends


def own_index(content: Mapping[str, Any]) -> int:
    """Return the index of our application in a configuration: the first with our import_path."""
    applications = content["applications"]
    for index, application in enumerate(applications):
        if application["import_path"] == IMPORT_PATH:
            return index
    raise ConfigError(
        f"no application has import_path: {IMPORT_PATH}; see serve_config.yaml in the project"
    )


def own_application(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return our application's part of a configuration."""
    application: Mapping[str, Any] = content["applications"][own_index(content)]
    return application


def check_listeners(content: Mapping[str, Any], request_timeout_s: float) -> None:
    """Check the options of the HTTP and gRPC listeners, which all applications share."""
    if content.get("proxy_location") == "Disabled":
        raise ConfigError(
            "proxy_location: Disabled: nobody would listen for clients; take EveryNode or HeadOnly"
        )
    for options in ("http_options", "grpc_options"):
        limit_s = (content.get(options) or {}).get("request_timeout_s")
        if limit_s is not None and limit_s <= request_timeout_s:
            raise ConfigError(
                f"{options}.request_timeout_s is {limit_s:g}, and args.request_timeout_s "
                f"{request_timeout_s:g}: Serve would answer first, and not in this "
                "service's form; leave out the first"
            )


def check_application(application: Mapping[str, Any], limits: LimitSettings) -> None:
    """Check the options of our application and its deployments."""
    deployments = application.get("deployments", [])
    counts = Counter(deployment["name"] for deployment in deployments)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(f"deployments has {twice[0]} twice: the second would win; leave one out")
    check_route_prefix(application.get("route_prefix", "/"))
    _check_grace(deployments, limits.request_timeout_s)
    for deployment in deployments:
        ongoing, ours = deployment.get("max_ongoing_requests"), limits.max_concurrent_requests
        if deployment["name"] == "Gateway" and ongoing is not None and ongoing < ours:
            raise ConfigError(
                f"Gateway has max_ongoing_requests of {ongoing}, and args.max_concurrent_requests "
                f"is {ours}: Serve would refuse first, and not in this service's form; raise the "
                "first, or lower the second"
            )
        if deployment.get("user_config"):
            _check_user_config(deployment, limits.max_files)


def check_route_prefix(prefix: str | None) -> None:
    """Check the route prefix, below which the application's paths are."""
    if prefix is None:
        raise ConfigError("route_prefix: null: nobody could reach the service; leave it out, or /")
    if not prefix.startswith("/") or (prefix != "/" and prefix.endswith("/")):
        right = f"/{prefix.strip('/')}"
        raise ConfigError(
            f"route_prefix is {prefix!r}: it begins with a slash and ends with none: {right!r}"
        )
    if wrong := set(prefix) & set("{}?# \"'<>"):
        raise ConfigError(f"route_prefix is {prefix!r}: {min(wrong)!r} has no place in a path")


def _check_grace(deployments: list[Mapping[str, Any]], request_timeout_s: float) -> None:
    """Refuse deployments whose grace period is shorter than the time limit of a request."""
    grace_s = {d["name"]: d.get("graceful_shutdown_timeout_s") for d in deployments}
    for name, own_s in ({"Gateway": None} | grace_s).items():
        waits_s = SERVE_DEFAULT_GRACE_S if own_s is None else own_s
        if waits_s < request_timeout_s:
            default = " (Serve's default)" if own_s is None else ""
            raise ConfigError(
                f"{name} has a graceful_shutdown_timeout_s of {waits_s:g}{default}, and a request "
                f"has a request_timeout_s of {request_timeout_s:g} s: an update would cut "
                "answers that are still in time; raise the first, or lower the second"
            )


def _check_user_config(deployment: Mapping[str, Any], max_files: int) -> None:
    name = deployment["name"]
    if name in WITHOUT_USER_CONFIG:
        raise ConfigError(f"{name} takes no user_config: give it to the Gateway or to a member")
    try:
        QueueConfig.of(deployment["user_config"], max_files)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}") from error


def check_capacity(deployments: Sequence[Mapping[str, Any]], cpus: int) -> None:
    """Raise :class:`ConfigError` if the initial replicas do not fit one machine.

    Their ``num_cpus`` may be ``cpus`` together. A deployment may also have at most
    ``max_replicas_per_node`` of them.
    """
    for deployment in deployments:
        least, most = _num_replicas(deployment), deployment.get("max_replicas_per_node")
        if most is not None and least > most:
            raise ConfigError(
                f"the configuration asks for {least} replicas of {deployment['name']}, {most} of "
                "them on a node: this is one machine; take configs/laptop.yaml, or raise "
                "max_replicas_per_node"
            )
    needed = {d["name"]: _num_replicas(d) * _num_cpus(d) for d in deployments}
    if (total := sum(needed.values())) > cpus:
        shares = ", ".join(f"{name} {share:g}" for name, share in needed.items())
        raise ConfigError(
            f"the configuration asks for {total:g} CPUs ({shares}), this machine has {cpus}: take "
            "configs/laptop.yaml, or lower num_replicas or num_cpus"
        )


def check_memory(
    deployments: Sequence[Mapping[str, Any]], networks: Mapping[str, int], left: float
) -> None:
    """Raise :class:`ConfigError` if the initial replicas need more bytes than are ``left``.

    ``networks`` are the bytes of each set's networks.
    """
    replicas = {d["name"]: _num_replicas(d) for d in deployments}
    members = [num for name, num in replicas.items() if name not in ("Gateway", *WITHOUT_NETWORKS)]
    copies = min(members, default=replicas.get("Gateway", 1))
    total = sum(replicas.values())
    needed = {"Ray and HAProxy": RAY_BYTES, f"replicas ({total})": total * REPLICA_BYTES}
    needed |= {name: copies * size for name, size in networks.items()}
    if (most := sum(needed.values())) > left:
        shares = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in needed.items())
        raise ConfigError(
            f"the service needs about {most / 1e6:.0f} MB of memory ({shares}), and its memory "
            f"group gives {left / 1e6:.0f} MB: raise its limit (docker run --memory, MemoryMax "
            "of a systemd unit, resources.limits of a pod), or set fewer batch_sizes or sets"
        )


def oversubscribed(deployments: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on replicas that would use the same cores; None if there are none."""
    for deployment in deployments:
        name, share = deployment["name"], _num_cpus(deployment)
        replicas = _num_replicas(deployment)
        if name in ALL_CORES and replicas > 1 and share < 1:
            return (
                f"{replicas} replicas of {name} have {share:g} of a CPU each, and each would use "
                "all cores of its machine: give whole num_cpus, or one replica"
            )
    return None


def _num_replicas(deployment: Mapping[str, Any]) -> int:
    scaling = deployment.get("autoscaling_config") or {}
    least = scaling.get("initial_replicas") or scaling.get("min_replicas", 1)
    asked = deployment.get("num_replicas")
    return int(asked) if isinstance(asked, int) else int(least)  # for "auto", the minimum


def _num_cpus(deployment: Mapping[str, Any]) -> float:
    options = deployment.get("ray_actor_options")
    if options is None and deployment["name"] in HUBS:
        return 0.0
    asked = (options or {}).get("num_cpus")
    return SERVE_DEFAULT_CPUS if asked is None else float(asked)


def check_host(host: str, option: str) -> None:
    """Raise :class:`ConfigError` unless it is an address or a name; ``""`` is all interfaces."""
    if not HOST.fullmatch(host):
        raise ConfigError(
            f"{option} is {host!r}: give an address, as 127.0.0.1 or ::1; 0.0.0.0 and :: are all "
            "interfaces"
        )


class HttpOptions(BaseModel):
    """The address of the service and its TLS files, from Serve's ``http_options``.

    Raises:
        ConfigError: the host is not a valid address or name.
    """

    model_config = ConfigDict(frozen=True)

    host: str
    port: int
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None

    @field_validator("host")
    @classmethod
    def _is_an_address(cls, host: str) -> str:
        check_host(host, "http_options.host")
        return host

    @property
    def scheme(self) -> str:
        return "https" if self.ssl_certfile and self.ssl_keyfile else "http"

    @property
    def is_on_loopback(self) -> bool:
        """Whether only this machine reaches the service."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def address(self, port: int) -> str:
        """Return ``port`` with the address at which this machine reaches the service."""
        return joined(REACHED_AT.get(self.host, self.host), port)


@dataclass(frozen=True)
class Tls:
    """PEM files: the certificate with its intermediates, its key, and the clients' CA."""

    certificate: Path
    key: Path
    clients: Path | None  # CA of the clients' certificates; None: any client may connect

    def link(self, folder: Path) -> str:
        """Link the files into the run's folder; return HAProxy's ``bind`` arguments for them.

        HAProxy looks for the key next to the certificate. Links, not copies: the key exists once,
        and a restarted HAProxy reads renewed files (:mod:`app.launch.haproxy`).
        """
        chain = folder / CHAIN
        for link, target in ((chain, self.certificate), (folder / f"{CHAIN}.key", self.key)):
            link.symlink_to(target.absolute())
        # HTTP/2 would save browsers a connection or two, but has its own form of slow loris.
        words = f"crt {chain} alpn http/1.1"
        if self.clients:
            roots = folder / "clients.pem"
            roots.symlink_to(self.clients.absolute())
            words += f" ca-file {roots} verify required"
        return words


def tls_of(http: HttpOptions) -> Tls | None:
    """Return the TLS files of the options, or None without TLS.

    Raises:
        ConfigError: a file is missing or not PEM, the key is encrypted or does not match, or there
            are options of TLS without a certificate.
    """
    certificate, key, clients = http.ssl_certfile, http.ssl_keyfile, http.ssl_ca_certs
    if http.scheme == "http" and (clients or http.ssl_keyfile_password):
        raise ConfigError(
            "http_options.ssl_ca_certs and ssl_keyfile_password are for TLS, and would be "
            "ignored: give ssl_certfile and ssl_keyfile too"
        )
    if not certificate or not key:
        return None
    if http.ssl_keyfile_password:
        raise ConfigError(
            "http_options.ssl_keyfile_password: HAProxy takes no passphrase; take it off with "
            "openssl pkey -in KEY -out NEW and chmod 600 NEW"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, no_passphrase)
        if clients:
            context.load_verify_locations(clients)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = ", ".join(filter(None, (certificate, key, clients)))
        raise ConfigError(f"http_options.ssl_...: {reason(error)} ({files})") from error
    return Tls(Path(certificate), Path(key), Path(clients) if clients else None)


def joined(host: str, port: int) -> str:
    """Return ``host:port``, with IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_distinct(ports: Mapping[str, int | None]) -> None:
    """Raise :class:`ConfigError` if two options have the same port; None means that it is off."""
    owners: dict[int, str] = {}
    for option, port in ports.items():
        if port is not None and (other := owners.setdefault(port, option)) != option:
            raise ConfigError(
                f"{other} and {option} are both {port}: give one of them another port"
            )


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Raise :class:`ConfigError` unless ``host:port`` can be listened on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            advice = f"{_owner(port)}; stop what uses it, or choose another port with {option}"
            if isinstance(error, OSError) and error.errno not in (errno.EADDRINUSE, errno.EACCES):
                of_host = "--metrics-host" if option == "--metrics-port" else "--host"
                advice = f"; give an address of this machine with {of_host}"
            raise ConfigError(f"cannot listen on {joined(host, port)}: {reason}{advice}") from error


def metrics_port(asked: int | None, of_service: Collection[int | None] = ()) -> int:
    """Return the requested port; without one the usual port, or a free one if that is in use.

    The usual port counts as in use while another service that starts may take it, and if it is one
    of ``of_service``: those on which this service will listen.

    Raises:
        ConfigError: the process cannot listen on the requested port.
    """
    if asked is not None:
        check_port("127.0.0.1", asked, "--metrics-port")
        return asked
    with contextlib.suppress(ConfigError):
        check_port("127.0.0.1", METRICS_PORT)
        if METRICS_PORT not in of_service and _reserve(METRICS_PORT):
            return METRICS_PORT
    return free_port()


def _reserve(port: int) -> bool:
    """Return whether no other start of a service on this machine has reserved the port.

    Ray listens there seconds later. Of two services that start together, the second one's Ray
    would end then. The reservation is an abstract socket, which the kernel removes with the
    process; like ports, they belong to a network namespace.
    """
    if port in _reserved or sys.platform != "linux":
        return True
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0tandem-port-{port}")
    except OSError:
        name.close()
        return False
    name.detach()  # stays open
    _reserved.add(port)
    return True


def _owner(port: int) -> str:
    """Return the name of the process that listens on ``port``, if the system reveals it."""
    with contextlib.suppress(psutil.Error):
        for bound in psutil.net_connections("tcp"):
            if bound.status == psutil.CONN_LISTEN and bound.laddr and bound.laddr.port == port:
                name = psutil.Process(bound.pid).name() if bound.pid else "?"
                return f" (process {bound.pid}, {name})"
    return ""


def free_port() -> int:
    """Return a free port of the loopback interface; each call returns another one.

    The port is outside of the kernel's ephemeral range: Ray takes about forty of those while it
    starts, perhaps this one. Ray's workers use 10002 to 19999, Serve's replicas ``OF_REPLICAS``.
    """
    try:
        first, last = (int(part) for part in LOCAL_PORT_RANGE.read_text("ascii").split())
    except (OSError, ValueError):
        first, last = 32768, 60999
    others = {*range(first, last + 1), *OF_REPLICAS, *_given}
    candidates = [port for port in range(20_000, 65_536) if port not in others]
    for port in random.sample(candidates, min(1000, len(candidates))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    with socket.socket() as probe:  # the ephemeral range covers all ports from 20000 up
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
