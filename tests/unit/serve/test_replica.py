"""A replica's process: gRPC servers as Serve makes them, and a stage's channel."""

import asyncio
import gc
import pickle
from concurrent.futures import Future
from copy import copy
from types import SimpleNamespace

import grpc
import psutil
import pytest
import ray
from grpc.aio._server import Server
from ray import cloudpickle, serve
from ray.serve._private import constants, grpc_util, haproxy_templates

from app.environment import MIB, PREPARE_PROXY, PROXY_CALLBACK, serve_environment
from app.grpc.interface import GrpcInterface
from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from app.serve import replica as replicas
from app.serve.channels import ChannelServer, address_of, connected
from app.serve.ray_compatibility import GRPC_OPTIONS, check_ray
from app.settings import Settings
from app.telemetry.export import pipeline
from tests.support.cases import cases
from tests.support.certificates import Root
from tests.support.fakes import FakeService
from tests.support.grpc_replica import grpc_replica
from tests.support.slow_relay import slow_relay

WINDOW_BYTES = 65535  # HTTP/2's own
NUM_CALLS = 4


def options_of_serve() -> list[tuple[str, object]]:
    return vars(grpc_util)["DEFAULT_GRPC_SERVER_OPTIONS"]


class Unread(GrpcInterface):
    """Receives nothing of a call until ``gate`` is open."""

    def __init__(self) -> None:
        super().__init__(FakeService(Settings(max_body_bytes=8 * MIB)))
        self.gate = asyncio.Event()
        self.gate.set()

    async def classify(self, *call):
        await self.gate.wait()
        return await super().classify(*call)


async def test_what_nobody_receives_stays_with_the_client() -> None:
    replicas.limit_unread(8 * MIB)
    interface = Unread()
    async with (
        grpc_replica(interface) as port,
        slow_relay(port) as relay,
        grpc.aio.insecure_channel(f"127.0.0.1:{relay.port}") as channel,
    ):
        classify, large = EnsembleStub(channel).Classify, ClassifyRequest(images=[bytes(7 * MIB)])
        for _ in range(3):  # from which grpcio would learn how fast this connection is
            await classify(large)
        before = relay.num_passed
        interface.gate.clear()
        calls = [classify(large, timeout=1.0) for _ in range(NUM_CALLS)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {end.code() for end in ends} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert NUM_CALLS * 1000 < relay.num_passed - before < NUM_CALLS * 2 * WINDOW_BYTES


async def test_a_message_may_have_as_much_as_it_is_told() -> None:
    replicas.limit_unread(MIB)
    interface = Unread()
    async with (
        grpc_replica(interface) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await EnsembleStub(channel).Classify(ClassifyRequest(images=[bytes(2 * MIB)]))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in caught.value.details()


def test_each_option_is_there_once() -> None:
    """Serve prepares a process for each of its servers."""
    for limit in (MIB, 2 * MIB):
        replicas.limit_unread(limit)
    options = options_of_serve()
    assert options is constants.DEFAULT_GRPC_SERVER_OPTIONS
    assert sorted(name for name, _ in options) == sorted({name for name, _ in options})
    assert dict(options) | {replicas.BDP_PROBE: 0, replicas.MAX_RECEIVE: 2 * MIB} == dict(options)


@pytest.mark.parametrize("options", [None, (), [("grpc.other", 1)]])
def test_with_a_ray_that_does_it_in_another_way_the_limits_are_left_out(options, monkeypatch):
    before = copy(options)
    monkeypatch.setattr(grpc_util, "DEFAULT_GRPC_SERVER_OPTIONS", options)
    replicas.limit_unread()
    assert before == options_of_serve()
    (warning,) = check_ray([GRPC_OPTIONS])
    assert "DEFAULT_GRPC_SERVER_OPTIONS lists no grpc.max_receive_message_length" in warning


def test_serve_is_told_of_it(tmp_path) -> None:
    environment = serve_environment(tmp_path, (1, 2))
    path = f"{replicas.prepare_proxy.__module__}:{replicas.prepare_proxy.__name__}"
    assert environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == path
    assert replicas.prepare_proxy() == []
    assert (replicas.BDP_PROBE, 0) in options_of_serve()


def test_each_process_that_listens_for_http_drops_trailers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    names = "keep_to_loopback", "limit_unread", "limit_reflection", "start_metrics"
    for name in (*names, "write_to_stderr_as_to_files"):
        monkeypatch.setattr(replicas, name, lambda *_, **__: None)
    monkeypatch.setattr(replicas, "drop_trailers", lambda: asked.append("dropped"))
    monkeypatch.setattr(replicas, "gc", SimpleNamespace(set_threshold=lambda *_: None))
    monkeypatch.setattr(replicas, "pipeline", SimpleNamespace(start=lambda *_, **__: None))
    replicas.start_replica(Settings())
    assert not asked
    replicas.start_replica(Settings(), is_ingress=True)
    replicas.prepare_proxy()
    assert len(asked) == 2


class Actor:
    """An actor of Ray's, which takes functions unless it is ``dead``."""

    def __init__(self, *, is_dead: bool = False) -> None:
        self.num_taken, self.is_dead = 0, is_dead
        self.__ray_call__ = self  # Ray's name

    def remote(self, function):
        if self.is_dead:
            raise ray.exceptions.RayActorError(error_msg="the actor is dead")
        self.num_taken += 1
        future = Future[None]()
        future.set_result(pickle.loads(cloudpickle.dumps(function))(self))
        return SimpleNamespace(future=lambda: future)


def test_proxies_that_nobody_prepared_are_asked_to_drop_trailers(monkeypatch, caplog):
    actors = {"SERVE_PROXY_ACTOR-1": Actor(), "SERVE_CONTROLLER": Actor(is_dead=True)}
    named = [{"name": name, "namespace": "serve"} for name in actors]
    named.append({"name": "SERVE_PROXY_ACTOR-2", "namespace": "another"})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actors[name])
    monkeypatch.setattr(ray.util, "list_named_actors", lambda **_: named)
    replicas.drop_trailers_in_proxies()
    monkeypatch.setenv(PROXY_CALLBACK, PREPARE_PROXY)
    replicas.drop_trailers_in_proxies()
    assert (actors["SERVE_PROXY_ACTOR-1"].num_taken, caplog.messages) == (1, [])
    monkeypatch.delenv(PROXY_CALLBACK)
    actors["SERVE_PROXY_ACTOR-1"].is_dead = True
    replicas.drop_trailers_in_proxies()
    (told,) = caplog.messages
    assert "take trailers of a body for headers: the actor is dead" in told.replace("\n", " ")


# A stage's replica listens for the Gateways of its node, and ends when they are answered.


class Stage:
    def __init__(self, settings: Settings) -> None:
        self.num_checks = 0

    async def check_health(self) -> None:
        self.num_checks += 1


class Replica(replicas.SharedStageReplica, Stage):
    async def answer_many(self, message: bytes) -> bytes:
        return message


CONTEXT = SimpleNamespace(
    app_name="app", deployment="stage", replica_id=SimpleNamespace(unique_id="of-a-test")
)
ADDRESS = address_of("app", "stage", "of-a-test")


@pytest.fixture
def _no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "start_replica", lambda _: None)
    monkeypatch.setattr(serve, "get_replica_context", lambda: CONTEXT)


@pytest.mark.usefixtures("_no_service")
async def test_it_listens_from_its_first_health_check_on_until_it_ends() -> None:
    replica = Replica(Settings())
    assert "__del__" in vars(replica)  # where Serve looks, and not the garbage collector
    assert not hasattr(type(replica), "__del__")
    for _ in range(2):
        await replica.check_health()
    assert replica.num_checks == 2
    channel = await connected(ADDRESS)
    assert await channel.call(b"!") == b"!"
    await replica.__del__()
    with pytest.raises(ConnectionRefusedError):
        await connected(ADDRESS)
    channel.abort()


@pytest.mark.usefixtures("_no_service")
@pytest.mark.parametrize("is_there", [True, False])
async def test_without_channels_it_does_not_listen(monkeypatch, is_there):
    monkeypatch.setattr(replicas, "IS_THERE", is_there)  # False: no Linux
    replica = Replica(Settings(local_channels=not is_there))
    await replica.check_health()
    with pytest.raises(ConnectionRefusedError):
        await connected(ADDRESS)
    await replica.__del__()


@pytest.mark.usefixtures("_no_service")
async def test_if_it_cannot_listen_it_works_and_tries_again(monkeypatch, caplog):
    start, errors = ChannelServer.start, [OSError(24, "Too many open files")]

    async def fail_once(server: ChannelServer) -> None:
        if errors:
            raise errors.pop()
        await start(server)

    monkeypatch.setattr(ChannelServer, "start", fail_once)
    replica = Replica(Settings())
    await replica.check_health()
    assert replica.num_checks == 1
    assert "Too many open files" in caplog.text
    await replica.check_health()
    (await connected(ADDRESS)).abort()
    await replica.__del__()


# gRPC servers as Serve makes them: on loopback where Ray is, else as they would be.


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The node's address, to be set; grpcio is as before at the end."""
    address = ["127.0.0.1"]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address[0])
    monkeypatch.setattr(Server, "add_insecure_port", Server.add_insecure_port)
    monkeypatch.setattr(Server, "add_secure_port", Server.add_secure_port)
    return address


async def listening_on(address: str, *credentials: grpc.ServerCredentials) -> str:
    server = grpc.aio.server()
    add = server.add_secure_port if credentials else server.add_insecure_port
    port = add(address, *credentials)
    await server.start()
    try:
        connections = psutil.Process().net_connections("tcp")
        (ip,) = {c.laddr.ip for c in connections if c.laddr and c.laddr.port == port}
    finally:
        await server.stop(None)
    return str(ip).removeprefix("::ffff:")


@cases(
    "node_address, is_ray, address, listens",
    ("127.0.0.1", True, "[::]:0", "127.0.0.1"),
    ("127.0.0.1", True, "127.0.0.2:0", "127.0.0.2"),  # that somebody chose
    ("10.0.0.7", True, "[::]:0", "::"),  # a node of a cluster
    ("127.0.0.1", False, "[::]:0", "::"),  # outside Ray
)
async def test_a_node_on_loopback(
    node, monkeypatch, tmp_path, node_address, is_ray, address, listens
):
    """With RAY_USE_TLS too, where Serve asks for another method."""
    node[0] = node_address
    monkeypatch.setattr(ray, "is_initialized", lambda: is_ray)
    for _ in range(2):  # Serve asks once for each server
        replicas.keep_to_loopback()
    assert await listening_on(address) == listens
    signed = Root(tmp_path).sign("node")
    pair = (signed.key.read_bytes(), signed.certificate.read_bytes())
    assert await listening_on(address, grpc.ssl_server_credentials([pair])) == listens


@pytest.mark.usefixtures("node")
async def test_replicas_that_all_gateways_share(monkeypatch):
    for name in ("start_metrics", "write_to_stderr_as_to_files"):
        monkeypatch.setattr(replicas, name, lambda **_: None)
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(pipeline, "start", lambda *_, **__: None)
    replicas.Hub(Settings(), None)
    assert await listening_on("[::]:0") == "127.0.0.1"


def test_haproxys_own_port_is_where_http_is() -> None:
    text = "\n".join(v for v in vars(haproxy_templates).values() if isinstance(v, str))
    assert "bind {{ config.grpc_frontend_host }}:{{ config.grpc_frontend_port }}" in text
