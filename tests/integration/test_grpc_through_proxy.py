"""gRPC in Serve's default mode, through its proxy, with every stage a deployment of its own."""

import asyncio

import grpc
import pytest

from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from tests.support.services.deployed import MEMBERS
from tests.support.slow_relay import slow_relay
from tests.support.tiny_networks import picture
from tests.support.trace_checks import by_trace, check_whole, num_whole

METHOD = "tandem.v1.Ensemble/Classify"


@pytest.fixture
def ensemble(served):
    with grpc.insecure_channel(f"127.0.0.1:{served.config.grpc_port}") as channel:
        yield EnsembleStub(channel)


def test_the_answer_is_that_of_http_and_a_trace(ensemble, client, spans):
    images = [picture("red"), b"no picture", picture("blue")]
    over_http = [client.post("/v1/classify", content=image).json() for image in images]
    reply, call = ensemble.Classify.with_call(ClassifyRequest(images=images), timeout=60)
    for place in (0, 2):
        found, answer = reply.results[place].classified, over_http[place]
        assert [p.label for p in found.predictions] == [p["label"] for p in answer["predictions"]]
        assert set(found.members) == set(MEMBERS)
        assert found.agreement == answer["agreement"]
    assert reply.results[1].error.message == over_http[1]["error"]["message"]
    trace_id = dict(call.trailing_metadata())["x-trace-id"]
    own = [*MEMBERS]
    spans.wait_for(
        lambda found: num_whole((s for s in found if s.trace_id == trace_id), own, METHOD) == 1
    )
    trace = by_trace(spans.spans)[trace_id]
    check_whole(trace, METHOD)
    assert sum(span.name == "decode" for span in trace) == len(images)


def test_an_error_of_the_call(ensemble, served):
    limit = served.config.settings.max_files
    with pytest.raises(grpc.RpcError) as caught:
        ensemble.Classify(ClassifyRequest(images=[picture("red")] * (limit + 1)), timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"the limit is {limit}" in caught.value.details()
    assert dict(caught.value.trailing_metadata())["error-code"] == "too_many_files"


def test_a_message_that_does_not_come_is_not_waited_for(served):
    port = served.config.grpc_port
    assert port is not None

    async def stop_half_way() -> grpc.aio.AioRpcError:
        async with (
            slow_relay(port, 100_000) as relay,
            grpc.aio.insecure_channel(f"127.0.0.1:{relay.port}") as channel,
        ):
            call = EnsembleStub(channel).Classify(
                ClassifyRequest(images=[bytes(2**22)]),
                timeout=30,
                metadata=[("x-request-timeout-seconds", "0.5")],
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            return caught.value

    error = asyncio.run(stop_half_way())
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert dict(error.trailing_metadata())["error-code"] == "slow_body"
