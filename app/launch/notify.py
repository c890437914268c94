"""Reports the service's state to systemd with sd_notify: datagrams to the socket that it names."""

import contextlib
import socket

from app.environment import environment_value

SOCKET_VARIABLE = "NOTIFY_SOCKET"


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
