"""A multi-label set over gRPC: the lists, the threshold, and what is not set."""

import grpc
import pytest

from app.grpc.interface import GrpcInterface
from app.grpc.tandem_pb2 import ClassifyRequest
from tandem_client.grpc_client import _outcomes
from tandem_client.options import Options
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.scored_service import scored_service
from tests.support.scored_sets import scored_picture, write_scored_set


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    return scored_service(str(write_scored_set(tmp_path_factory.mktemp("scored"))))


async def classify(service, *names: str, **asked: float):
    context = context_of()
    images = [scored_picture(name) for name in names]
    request = ClassifyRequest(images=images, **asked)
    incoming = stream_of(request.SerializeToString())
    return await GrpcInterface(service).classify(incoming, context), context


async def test_each_image_has_its_list(service):
    reply, _ = await classify(service, "cyan", "black")
    cyan, black = (result.classified for result in reply.results)
    assert [one.label for one in cyan.predictions] == ["has blue", "has green"]
    assert cyan.threshold == 0.5
    assert not black.predictions
    assert not black.members["steep"].HasField("label")
    assert cyan.members["steep"].label == "has blue"


async def test_the_client_reads_it(service):
    reply, _ = await classify(service, "cyan", "black")
    cyan, black = _outcomes(reply, 2, Options("grpc://x"))
    assert cyan.labels == ("has blue", "has green")
    assert (black.labels, black.threshold, black.members["flat"].label) == ((), 0.5, None)


async def test_another_threshold(service):
    reply, _ = await classify(service, "red", threshold=0.01, top_k=3)
    (red,) = reply.results
    assert len(red.classified.predictions) == 3
    assert red.classified.threshold == 0.01
    reply, context = await classify(service, "red", threshold=1.5)
    assert context.code() == grpc.StatusCode.INVALID_ARGUMENT
