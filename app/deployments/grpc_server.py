"""Changes the gRPC servers that Serve makes: address, read-ahead and reflection v1.

Messages have a size limit, and unread bytes should stay with the client. By default grpcio lets a
client send 4 MB ahead on a fast connection, since it estimates the bandwidth-delay product (BDP).
Without the estimate it is 64 KiB, HTTP/2's own window. Either way, a message that is being received
is let in whole.

Serve makes these servers with the options in a list of one of its private modules
(:data:`app.calls.ray_features.GRPC_OPTIONS`), in replicas after the ingress has been made.
"""

import ipaddress
from collections.abc import Callable
from functools import wraps
from typing import Any

import ray

from app.calls.ray_compatibility import check_ray
from app.calls.ray_features import GRPC_OPTIONS, LOOPBACK, REFLECTION

ALL_INTERFACES = "[::]:"
BDP_PROBE = "grpc.http2.bdp_probe"
MAX_RECEIVE = "grpc.max_receive_message_length"


def prepare_proxy() -> list[Any]:
    """Prepare a proxy's process before it listens; return an empty list of HTTP middlewares.

    Serve also calls it in replicas of the ingress (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``).
    """
    limit_unread()
    keep_to_loopback()
    answer_reflection_v1()
    return []


def answer_reflection_v1() -> None:
    """Let gRPC servers made from now on answer reflection v1 in addition to v1alpha."""
    if not REFLECTION.fits():
        return
    from ray.serve._private import grpc_util

    from app.grpc.reflection import add_reflection_v1  # Ray 2.59 does not install grpcio's own

    enable = grpc_util.enable_server_reflection
    if hasattr(enable, "__wrapped__"):
        return

    @wraps(enable)
    def enable_both(server: Any) -> None:
        names = grpc_util.get_service_names(server.generic_rpc_handlers)
        add_reflection_v1(server, {name for name in names if not name.startswith("ray.serve.")})
        enable(server)

    grpc_util.enable_server_reflection = enable_both


def limit_unread(max_message_bytes: int | None = None) -> None:
    """Let gRPC servers made from now on read ahead no more than HTTP/2's own window.

    It has no effect if the installed Ray passes options to its servers in another way.

    Args:
        max_message_bytes: the limit of a message; None: RAY_SERVE_GRPC_MAX_MESSAGE_SIZE.

    """
    if not GRPC_OPTIONS.fits():
        return
    _set(BDP_PROBE, 0)
    if max_message_bytes is not None:
        _set(MAX_RECEIVE, max_message_bytes)


def _set(name: str, value: int) -> None:
    from ray.serve._private import grpc_util

    options: list[tuple[str, int]] = grpc_util.DEFAULT_GRPC_SERVER_OPTIONS  # type: ignore[attr-defined]
    options[:] = [option for option in options if option[0] != name]
    options.append((name, value))


def keep_to_loopback() -> None:
    """Let gRPC servers of this process listen on 127.0.0.1 if the node's address is loopback.

    Serve binds them to all interfaces, without an option: the server of each replica that answers
    gRPC clients behind HAProxy, the fallback proxy's, and the one by which replicas call each
    other, which unpickles messages of whoever has Ray's token.

    Raises:
        ConfigError: the installed Ray or grpcio cannot be changed in this way.

    """
    check_ray((LOOPBACK,))
    if ray.is_initialized() and _is_on_loopback():
        # The class that grpc.aio.server() returns, and the base class of Serve's own.
        from grpc.aio._server import Server

        if not hasattr(Server.add_insecure_port, "__wrapped__"):
            Server.add_insecure_port = _on_loopback(Server.add_insecure_port)


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
