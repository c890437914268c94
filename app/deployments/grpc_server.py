"""Sets two options of Serve's gRPC servers for clients, which Serve has no setting for.

A message has a limit, and what nobody has received yet stays with the client. By itself grpcio
lets a client send 4 MB ahead of that on a fast connection (it estimates the bandwidth-delay
product, BDP); without the estimate it is 64 KiB, HTTP/2's own window. Once a message is being
received its whole length is let in, by both.

Leans on this of Ray 2.60: ``start_grpc_server`` of ``ray.serve._private.grpc_util`` makes these
servers, of replicas when the ingress has been made, with ``DEFAULT_GRPC_SERVER_OPTIONS`` of that
module, a list of pairs.
"""

from typing import Any

from ray.serve._private import grpc_util

from app.deployments.loopback import keep_to_loopback
from app.errors import ConfigError

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

    Args:
        max_message_bytes: what one may have; None: as RAY_SERVE_GRPC_MAX_MESSAGE_SIZE says.

    Raises:
        ConfigError: this Ray gives its servers their options in another way.

    """
    _set(BDP_PROBE, 0)
    if max_message_bytes is not None:
        _set(MAX_RECEIVE, max_message_bytes)


def _set(name: str, value: int) -> None:
    options = _options()
    options[:] = [option for option in options if option[0] != name]
    options.append((name, value))


def _options() -> list[tuple[str, int]]:
    options = getattr(grpc_util, "DEFAULT_GRPC_SERVER_OPTIONS", None)
    if not isinstance(options, list) or MAX_RECEIVE not in [name for name, _ in options]:
        raise ConfigError(
            "this Ray does not take gRPC options from ray.serve._private.grpc_util, as 2.60 does; "
            f"there is {options!r}: install ray[serve]==2.60.0"
        )
    return options
