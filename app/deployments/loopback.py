"""Binds Serve's gRPC servers to loopback where Ray itself listens on loopback alone.

Serve binds them to all interfaces and has no option for it: the one of each replica that answers
gRPC clients behind HAProxy, the fallback proxy's, and the one by which replicas call each other,
which unpickles what those send who have Ray's token.
"""

import ipaddress
from typing import Any

import ray
from grpc.aio._server import Server  # what grpc.aio.server() makes, and Serve's own derives from

ALL_INTERFACES = "[::]:"


def keep_to_loopback() -> list[Any]:
    """Let this process's gRPC servers listen on 127.0.0.1 if its node's address is one of those.

    Serve calls it in each proxy and in each replica of the ingress before either listens
    (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``), and takes a list of HTTP middlewares, which is
    empty; the stages call it in replicas of their own.
    """
    if ray.is_initialized() and _is_on_loopback():
        Server.add_insecure_port = _on_loopback
    return []


_on_all = Server.add_insecure_port


def _on_loopback(server: Server, address: str) -> int:
    if address.startswith(ALL_INTERFACES):
        address = "127.0.0.1:" + address.removeprefix(ALL_INTERFACES)
    return int(_on_all(server, address))


def _is_on_loopback() -> bool:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return ipaddress.ip_address(address).is_loopback
