"""TCP ports: checks that a port is free, names its owner, or chooses a free one."""

import contextlib
import errno
import random
import socket
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from app.errors import ConfigError

METRICS_PORT = 9464  # OpenTelemetry's default for Prometheus scrapes
LOCAL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
OF_REPLICAS = range(30_000, 31_001)  # RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT to MAX, ascending
_given: set[int] = set()
_reserved: set[int] = set()  # until this process ends


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
    if METRICS_PORT not in of_service:
        with contextlib.suppress(ConfigError):
            check_port("127.0.0.1", METRICS_PORT)
            if _reserve(METRICS_PORT):
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
        for connection in psutil.net_connections("tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN
            if is_listening and connection.laddr and connection.laddr.port == port:
                name = psutil.Process(connection.pid).name() if connection.pid else "?"
                return f" (process {connection.pid}, {name})"
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
