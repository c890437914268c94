"""gRPC's health protocol, with the real service in front of members of the test."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from app.errors import NotReadyError
from app.graph.keys import Keys
from app.grpc.health import HealthInterface
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.open_inference import Graph

STATUS = health_pb2.HealthCheckResponse
CODE = grpc.StatusCode


async def asked(graph: Graph, service: str) -> tuple[Any, Any]:
    """Return the reply, and the context that has its status."""
    context = context_of()
    data = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    return await HealthInterface(graph.service).check(stream_of(data), context), context


@pytest.mark.parametrize("name", ["", "tandem.v1.Ensemble", "inference.GRPCInferenceService"])
async def test_it_serves_exactly_when_it_is_ready(name, monkeypatch):
    graph = Graph()
    graph.service.keys = Keys(["k" * 32])  # of which a probe has none
    reply, context = await asked(graph, name)
    assert (reply.status, context.code()) == (STATUS.SERVING, None)

    async def not_ready() -> None:
        raise NotReadyError("a member does not answer")

    monkeypatch.setattr(graph.service, "check_ready", not_ready)
    reply, context = await asked(graph, name)
    assert (reply.status, context.code()) == (STATUS.NOT_SERVING, None)


async def test_a_name_that_is_not_served():
    _, context = await asked(Graph(), "inference.GRPCInferenceServic")
    assert context.code() is CODE.NOT_FOUND
    assert "'inference.GRPCInferenceServic'" in context.details()
    assert "tandem.v1.Ensemble" in context.details()


async def test_a_message_that_is_none():
    context = context_of()
    await HealthInterface(Graph().service).check(stream_of(b"\xff\xff"), context)
    assert context.code() is CODE.INVALID_ARGUMENT
