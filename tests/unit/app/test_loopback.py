"""Where a replica's port for calls between deployments is bound."""

import inspect

import pytest
import ray
from ray.serve._private import replica

from app.loopback import ANYWHERE, REPLICA, keep_to_loopback


@pytest.fixture
def bound(monkeypatch):
    """What Serve binds to, after a stage was made in a replica."""
    addresses = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(
        replica, "add_port_to_grpc_server", lambda server, where: addresses.append(where) or 7
    )
    return addresses


@pytest.mark.parametrize(
    ("node", "expected"), [("127.0.0.1", "127.0.0.1:0"), ("10.0.0.7", "[::]:0")]
)
def test_only_a_node_of_loopback_keeps_to_itself(bound, monkeypatch, node, expected):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: node)
    keep_to_loopback()
    assert replica.add_port_to_grpc_server("server", "[::]:0") == 7
    assert bound == [expected]


def test_without_ray_nothing_is_touched(bound, monkeypatch):
    before = replica.add_port_to_grpc_server
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    keep_to_loopback()
    assert replica.add_port_to_grpc_server is before


def test_serve_still_binds_it_so():
    assert replica.__name__ == REPLICA
    assert f'add_port_to_grpc_server(self._server, "{ANYWHERE}:0")' in inspect.getsource(replica)
