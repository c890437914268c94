"""Binds Serve's gRPC servers to loopback where Ray itself listens on loopback alone.

Serve binds them to all interfaces and has no option for it: the one of each replica that answers
gRPC clients behind HAProxy, the fallback proxy's, and the one by which replicas call each other,
which unpickles what those send who have Ray's token.
"""

import ipaddress
from collections.abc import Callable
from functools import wraps
from typing import Any

import ray

from app.calls.ray_compatibility import check_ray
from app.calls.ray_features import LOOPBACK

ALL_INTERFACES = "[::]:"


def keep_to_loopback() -> list[Any]:
    """Let this process's gRPC servers listen on 127.0.0.1 if its node's address is one of those.

    Serve calls it in each proxy and in each replica of the ingress before either listens
    (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``), and takes a list of HTTP middlewares, which is
    empty; the stages call it in replicas of their own.

    Raises:
        ConfigError: the installed Ray or grpcio has nothing to do it by.

    """
    check_ray((LOOPBACK,))
    if ray.is_initialized() and _is_on_loopback():
        # What grpc.aio.server() makes, and Serve's own derives from.
        from grpc.aio._server import Server

        if not hasattr(Server.add_insecure_port, "__wrapped__"):
            Server.add_insecure_port = _on_loopback(Server.add_insecure_port)
    return []


def _on_loopback(add_insecure_port: Callable[[Any, str], int]) -> Callable[[Any, str], int]:
    @wraps(add_insecure_port)
    def add(server: Any, address: str) -> int:
        if address.startswith(ALL_INTERFACES):
            address = "127.0.0.1:" + address.removeprefix(ALL_INTERFACES)
        return int(add_insecure_port(server, address))

    return add


def _is_on_loopback() -> bool:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return ipaddress.ip_address(address).is_loopback
