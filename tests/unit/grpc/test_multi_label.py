"""A multi-label set over gRPC: the lists, the threshold, and what is not set."""

from typing import Any

import grpc
import pytest

from app.grpc import open_inference_pb2 as messages
from app.grpc.interface import GrpcInterface
from app.grpc.open_inference import OpenInferenceInterface
from app.grpc.tandem_pb2 import ClassifyRequest
from app.oip.inference import Inference
from tandem_client.exchange import Options
from tandem_client.grpc_client import _outcomes
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.open_inference import elements
from tests.support.scored_service import scored_service
from tests.support.scored_sets import scored_picture, write_scored_set


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    return scored_service(str(write_scored_set(tmp_path_factory.mktemp("scored"))))


async def classify(service, *names: str, **asked: Any):
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


@pytest.mark.parametrize(
    ("threshold", "width", "code"),
    [(0.0001, 3, None), (0.9999, 1, None), (2.0, 0, grpc.StatusCode.INVALID_ARGUMENT)],
)
async def test_the_open_inference_protocol(service, threshold, width, code):
    interface = OpenInferenceInterface(Inference(service))
    request = messages.ModelInferRequest(model_name="scored")
    request.inputs.add(name="image", datatype="BYTES", shape=[2, 1])
    request.raw_input_contents.append(elements(scored_picture("red"), scored_picture("black")))
    request.parameters["threshold"].double_param = threshold
    context = context_of()
    incoming = stream_of(request.SerializeToString())
    reply = await interface.call("ModelInfer", incoming, context)
    assert context.code() == code
    assert [list(one.shape) for one in reply.outputs] == ([[2, 3], [2, width]] if width else [])
