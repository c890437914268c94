"""The address of a running cluster: whether it is one, and whether anybody answers there.

Ray itself waits for minutes for a cluster that is not there, and hears no signal meanwhile.
"""

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from app.environment import environment_value
from app.errors import ConfigError

LOCAL, AUTO = "local", "auto"
HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
ANSWERS_WITHIN_S = 5.0
CURRENT = "ray_current_cluster"  # the file in which Ray keeps where this machine's cluster is


def check_address(address: str) -> None:
    """Raise :class:`ConfigError` if an address is none, or nobody listens there."""
    where = _of_auto() if address == AUTO else address
    if where is None:
        return  # Ray looks at the processes of this machine, and says so if there is none
    parts = HOST_AND_PORT.fullmatch(where)
    if parts is None:
        raise ConfigError(
            f"--address {address}: {where} is no address; give auto, or HOST:PORT of the cluster's "
            "head node, as ray start --head prints it"
        )
    try:
        host, port = parts["host"].strip("[]"), int(parts["port"])
        with socket.create_connection((host, port), ANSWERS_WITHIN_S):
            pass
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster at {where}: {getattr(error, 'strerror', None) or error}; start one "
            "with ray start --head"
        ) from error


def _of_auto() -> str | None:
    """Return what Ray takes for ``auto``: a variable, or the last cluster of this machine."""
    if (named := environment_value("RAY_ADDRESS")) not in (None, AUTO):
        return named
    place = environment_value("RAY_TMPDIR", "TMPDIR") or "/tmp"
    with contextlib.suppress(OSError):
        return Path(place, "ray", CURRENT).read_text("utf-8").strip() or None
    return None


@contextlib.contextmanager
def ending_on_signal(say: str) -> Iterator[None]:
    """End the process at once, with a last word, if a signal comes that it has a handler for.

    For what hears no signal: Ray's library, while it connects. Nothing has been started then.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end, args=(reader, say), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()


def _end(reader: socket.socket, say: str) -> None:
    with reader:
        if reader.recv(1):  # nothing: the other end was closed
            os.write(2, f"{say}\n".encode())
            os._exit(0)
