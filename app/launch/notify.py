"""Tells systemd how the service is: sd_notify's protocol, datagrams to a socket that it names."""

import contextlib
import socket

from app.environment import environment_value

SOCKET_VARIABLE = "NOTIFY_SOCKET"


def notify_systemd(state: str) -> None:
    """Send a state, as ``READY=1``, where systemd waits for one (``Type=notify``); else do nothing.

    A failure is systemd's to notice: it ends a service that is not ready in ``TimeoutStartSec``.
    """
    if address := environment_value(SOCKET_VARIABLE):
        name = f"\0{address[1:]}" if address.startswith("@") else address  # Linux's abstract names
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to_systemd,
        ):
            to_systemd.connect(name)
            to_systemd.sendall(state.encode())
