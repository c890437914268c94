"""TCP ports: whether one can be listened on, who has it, and one that is free."""

import contextlib
import socket

import psutil

from app.errors import ConfigError


def check_port(host: str, port: int) -> None:
    """Raise :class:`ConfigError` unless ``host:port`` can be listened on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot listen on {host}:{port}: {reason}{_owner(port)}; "
                "stop what uses it, or choose another port with --port"
            ) from error


def _owner(port: int) -> str:
    """Name the process that listens on ``port``, where the system tells."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN
            if is_listening and connection.laddr and connection.laddr.port == port:
                name = psutil.Process(connection.pid).name() if connection.pid else "?"
                return f" (process {connection.pid}, {name})"
    return ""


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
