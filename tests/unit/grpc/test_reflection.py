"""Reflection v1 over the wire, from a server as Serve makes it, asked by a client of v1."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio.to_thread
import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2 as messages
from ray.serve._private import grpc_util

from app.calls.ray_compatibility import check_ray
from app.calls.ray_features import REFLECTION
from app.deployments.grpc_server import answer_reflection_v1
from app.grpc.interface import GrpcInterface
from app.settings import Settings
from tests.support.fakes import FakeService
from tests.support.grpc_replica import grpc_replica
from tests.support.reflection_v1 import V1, reflection_v1

SERVICES = {
    "tandem.v1.Ensemble",
    "inference.GRPCInferenceService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
}
Request = messages.ServerReflectionRequest

pytestmark = pytest.mark.skipif(not REFLECTION.fits(), reason="Ray 2.59 has no reflection")


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(
        grpc_util, "enable_server_reflection", grpc_util.enable_server_reflection
    )  # put back after the test
    for _ in range(2):  # Serve prepares a process for each of its servers
        answer_reflection_v1()
    async with grpc_replica(GrpcInterface(FakeService(Settings()))) as port:
        yield port


async def at(port: int, ask: Callable[[grpc.Channel], Any]) -> Any:
    """Return what a blocking client gets; the server is on this loop."""

    def asked() -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            return ask(channel)

    return await anyio.to_thread.run_sync(asked)


async def test_a_client_of_v1_finds_every_service_and_its_messages(port: int) -> None:
    def described(channel: grpc.Channel) -> tuple[set[str], list[str], str]:
        database = reflection_v1(channel)
        pool = DescriptorPool(database)
        methods = [pool.FindServiceByName(name).methods[0].name for name in sorted(SERVICES)]
        field = pool.FindMessageTypeByName("tandem.v1.ClassifyRequest").fields_by_name["images"]
        return set(database.get_services()), methods, field.full_name

    names, methods, field = await at(port, described)
    assert names == SERVICES
    info = "ServerReflectionInfo"
    assert methods == ["Check", info, info, "ServerLive", "Classify"]
    assert field == "tandem.v1.ClassifyRequest.images"


async def test_what_is_not_there(port: int) -> None:
    asked = [Request(file_containing_symbol="tandem.v1.Ensembl"), Request()]

    def answers(channel: grpc.Channel) -> list[Any]:
        call = channel.stream_stream(
            V1, Request.SerializeToString, messages.ServerReflectionResponse.FromString
        )
        return [*call(iter(asked), timeout=60)]

    unknown, empty = await at(port, answers)
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert unknown.original_request == asked[0]
    assert empty.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_with_another_ray_v1_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(grpc_util, "get_service_names")
    before = grpc_util.enable_server_reflection
    answer_reflection_v1()
    assert grpc_util.enable_server_reflection is before
    (warning,) = check_ray([REFLECTION])
    assert "get_service_names is not there. Left out: gRPC reflection v1" in warning
