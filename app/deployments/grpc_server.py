"""Sets two options of Serve's gRPC servers for clients, which Serve has no setting for.

A message has a limit, and what nobody has received yet stays with the client. By itself grpcio
lets a client send 4 MB ahead of that on a fast connection (it estimates the bandwidth-delay
product, BDP); without the estimate it is 64 KiB, HTTP/2's own window. Once a message is being
received its whole length is let in, by both.

Serve makes these servers, of replicas when the ingress has been made, with the options that a list
of one of its private modules has (:data:`app.calls.ray_features.GRPC_OPTIONS`).
"""

from typing import Any

from app.calls.ray_features import GRPC_OPTIONS
from app.deployments.loopback import keep_to_loopback

BDP_PROBE = "grpc.http2.bdp_probe"
MAX_RECEIVE = "grpc.max_receive_message_length"


def prepare_proxy() -> list[Any]:
    """Prepare a proxy's process before it listens, and return no HTTP middlewares.

    Serve calls it in replicas of the ingress too (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``).
    """
    limit_unread()
    return keep_to_loopback()


def limit_unread(max_message_bytes: int | None = None) -> None:
    """Let gRPC servers that are made from now on read ahead no more than HTTP/2's own window.

    Does nothing where the installed Ray gives its servers their options in another way.

    Args:
        max_message_bytes: what one may have; None: as RAY_SERVE_GRPC_MAX_MESSAGE_SIZE says.

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
