"""The address of a replica's channel: a name in Linux's abstract namespace of Unix-domain sockets.

Such a name ends with its process, so nothing is left behind on disk, and is seen only by processes
of the same network namespace: of this machine, or of this container. It has no permissions; both
ends ask the kernel instead which user the other one is (``SO_PEERCRED``, unix(7)).
"""

import asyncio
import os
import socket
import struct

CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
MAX_NAME = 107  # bytes, after the leading zero


def address_of(app_name: str, deployment_name: str, replica_id: str) -> str:
    """Return the address; ``replica_id`` is Serve's, drawn anew for each replica."""
    name = f"tandem/{replica_id}/{app_name}/{deployment_name}".encode()[:MAX_NAME]
    return "\0" + name.decode(errors="ignore")


def listening_socket(address: str) -> socket.socket:
    """Return a socket bound to an address; raise OSError if another one is."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(address)
    except BaseException:
        found.close()
        raise
    return found


def is_same_user(transport: asyncio.BaseTransport) -> bool:
    """Whether the other end of a connection is a process of this process's user."""
    sock = transport.get_extra_info("socket")
    try:
        with socket.socket(fileno=os.dup(sock.fileno())) as own:  # uvloop's has no getsockopt
            found = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    except OSError:  # no file descriptor is left
        return False
    _, uid, _ = CREDENTIALS.unpack(found)
    return bool(uid == os.geteuid())
