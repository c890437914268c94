"""gRPC servers as Serve makes them: on loopback where Ray is, else as they would be."""

import gc

import grpc
import psutil
import pytest
import ray
from grpc.aio._server import Server
from ray.serve._private import haproxy_templates

from app.serve import replica
from app.serve.replica import Hub, keep_to_loopback
from app.settings import Settings
from app.telemetry.export import pipeline


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The node's address, to be set; grpcio is as before at the end."""
    address = ["127.0.0.1"]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address[0])
    monkeypatch.setattr(Server, "add_insecure_port", Server.add_insecure_port)
    return address


async def listening_on(address: str) -> str:
    server = grpc.aio.server()
    port = server.add_insecure_port(address)
    await server.start()
    try:
        connections = psutil.Process().net_connections("tcp")
        (found,) = {c.laddr.ip for c in connections if c.laddr and c.laddr.port == port}
    finally:
        await server.stop(None)
    return str(found)


async def test_a_node_on_loopback(node: list[str]) -> None:
    for _ in range(2):  # Serve asks once for each server
        keep_to_loopback()
    assert (await listening_on("[::]:0")).removeprefix("::ffff:") == "127.0.0.1"


async def test_replicas_that_all_gateways_share(
    node: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("start_metrics", "write_to_stderr_as_to_files"):
        monkeypatch.setattr(replica, name, lambda: None)
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(pipeline, "start", lambda *_, **__: None)
    Hub(Settings(), None)
    assert (await listening_on("[::]:0")).removeprefix("::ffff:") == "127.0.0.1"


async def test_an_address_that_somebody_chose_is_kept(node: list[str]) -> None:
    keep_to_loopback()
    assert (await listening_on("127.0.0.2:0")).removeprefix("::ffff:") == "127.0.0.2"


async def test_a_node_of_a_cluster(node: list[str]) -> None:
    node[0] = "10.0.0.7"
    keep_to_loopback()
    assert await listening_on("[::]:0") == "::"


async def test_outside_ray(node: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    keep_to_loopback()
    assert await listening_on("[::]:0") == "::"


def test_haproxys_own_port_is_where_http_is() -> None:
    text = "\n".join(v for v in vars(haproxy_templates).values() if isinstance(v, str))
    assert "bind {{ config.grpc_frontend_host }}:{{ config.grpc_frontend_port }}" in text
