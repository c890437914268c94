"""The options of Serve's gRPC servers: what a client sends before anybody receives it."""

import asyncio
from copy import copy

import grpc
import pytest
from ray.serve._private import constants, grpc_util

from app.environment import MIB, serve_environment
from app.grpc.interface import GrpcInterface
from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from app.serve.ray_compatibility import GRPC_OPTIONS, check_ray
from app.serve.replica import BDP_PROBE, MAX_RECEIVE, limit_unread, prepare_proxy
from app.settings import Settings
from tests.support.fakes import FakeService
from tests.support.grpc_replica import grpc_replica
from tests.support.slow_relay import slow_relay

WINDOW_BYTES = 65535  # HTTP/2's own
NUM_CALLS = 4


def options_of_serve() -> list[tuple[str, object]]:
    return vars(grpc_util)["DEFAULT_GRPC_SERVER_OPTIONS"]


@pytest.fixture(autouse=True)
def same_options():
    """Give the process its options back."""
    options = options_of_serve()
    before = list(options)
    yield
    options[:] = before


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
    limit_unread()
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
    limit_unread(MIB)
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
        limit_unread(limit)
    options = options_of_serve()
    assert options is constants.DEFAULT_GRPC_SERVER_OPTIONS
    assert sorted(name for name, _ in options) == sorted({name for name, _ in options})
    assert dict(options) | {BDP_PROBE: 0, MAX_RECEIVE: 2 * MIB} == dict(options)


@pytest.mark.parametrize("options", [None, (), [("grpc.other", 1)]])
def test_with_a_ray_that_does_it_in_another_way_the_limits_are_left_out(
    options, monkeypatch
) -> None:
    before = copy(options)
    monkeypatch.setattr(grpc_util, "DEFAULT_GRPC_SERVER_OPTIONS", options)
    limit_unread()
    assert before == options_of_serve()
    (warning,) = check_ray([GRPC_OPTIONS])
    assert "DEFAULT_GRPC_SERVER_OPTIONS lists no grpc.max_receive_message_length" in warning


def test_serve_is_told_of_it(tmp_path) -> None:
    environment = serve_environment(tmp_path, (1, 2))
    path = f"{prepare_proxy.__module__}:{prepare_proxy.__name__}"
    assert environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == path
    assert prepare_proxy() == []
    assert (BDP_PROBE, 0) in options_of_serve()
