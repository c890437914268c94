"""A replica's port for calls between deployments, kept to loopback where its node is."""

import ipaddress
import sys
from collections.abc import Callable
from typing import Any

REPLICA = "ray.serve._private.replica"
ANYWHERE = "[::]"  # what Serve binds to, whatever the node's own address is

Bind = Callable[[Any, str], int]


def keep_to_loopback() -> None:
    """Bind that port, which Serve opens after this, where the other nodes' replicas can be.

    On a node of loopback there are none. What arrives at the port is unpickled, so who reaches it
    can run any code, unless Ray asks for a token.
    """
    replica: Any = sys.modules.get(REPLICA)
    if replica is None:  # a test, or tandem tune
        return
    import ray

    if not ray.is_initialized():
        return
    address = ray.util.get_node_ip_address()
    if ipaddress.ip_address(address).is_loopback:
        replica.add_port_to_grpc_server = _binding(replica.add_port_to_grpc_server, address)


def _binding(bind: Bind, address: str) -> Bind:
    return lambda server, where: bind(server, where.replace(ANYWHERE, address))
