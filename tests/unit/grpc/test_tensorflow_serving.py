"""TensorFlow Serving over gRPC, with the real service in front of members of the test."""

from typing import Any

import grpc
import numpy as np
import pytest

from app.access import Keys
from app.errors import NotReadyError
from app.grpc import tensorflow_serving_pb2 as messages
from app.grpc.call import TENSORFLOW_METHODS
from app.grpc.tensorflow_serving import TensorFlowInterface, TensorFlowMethods
from app.oip.inference import Inference
from app.telemetry.metric_table import REQUESTS
from tests.support.cases import cases
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.open_inference import IMAGE, LABELS, MEAN, SIZE, VERSION, Graph, drawn

pytestmark = pytest.mark.usefixtures("behind_haproxy")

CODE = grpc.StatusCode
PIXELS = [SIZE, SIZE, 3]


class Client:
    """Calls methods in this process, as Serve does."""

    def __init__(self, graph: Graph) -> None:
        self._methods = TensorFlowMethods()
        self._methods._tensorflow = TensorFlowInterface(Inference(graph.service))

    async def call(self, method, name="imagenette", metadata=None, *, spec=None, **fields):
        """Return the reply, and the context that has its status."""
        spec = {"name": name} | (spec or {})
        request = getattr(messages, f"{method}Request")(model_spec=spec, **fields)
        context = context_of(**(metadata or {}))
        stream = stream_of(request.SerializeToString())
        return await getattr(self._methods, method)(incoming=stream, grpc_context=context), context

    async def predict(self, inputs, **fields):
        return await self.call("Predict", inputs=inputs, **fields)


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def client(graph) -> Client:
    return Client(graph)


def tensor(dtype: str, shape: list[int] | None, **contents: Any) -> messages.TensorProto:
    dims = messages.TensorShapeProto(dim=[{"size": size} for size in shape or []])
    return messages.TensorProto(dtype=dtype, tensor_shape=dims, **contents)


def files(*images: bytes, shape: list[int] | None = None) -> messages.TensorProto:
    return tensor("DT_STRING", [len(images)] if shape is None else shape, string_val=images)


def pixels(num: int = 1) -> messages.TensorProto:
    return tensor("DT_UINT8", [num, *PIXELS], tensor_content=drawn(num).tobytes())


@cases(
    "inputs, num",
    ({"image": files(IMAGE)}, 1),
    ({"image": files(IMAGE, IMAGE)}, 2),
    ({"image": files(IMAGE, shape=[1, 1])}, 1),
    ({"image": tensor("DT_STRING", None, string_val=[IMAGE])}, 1),  # a scalar
    ({"pixels": pixels(2)}, 2),
)
async def test_files_and_pixels_get_what_v1_answers(client, inputs, num):
    reply, context = await client.predict(inputs)
    assert context.code() is None, context.details()
    spec = reply.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == (
        *("imagenette", 1),
        "serving_default",
    )
    rows, labels = reply.outputs["probabilities"], reply.outputs["label"]
    assert [dim.size for dim in rows.tensor_shape.dim] == [num, 10]
    assert np.reshape(rows.float_val, (num, 10)) == pytest.approx(np.tile(MEAN, (num, 1)), abs=1e-6)
    assert list(labels.string_val) == [LABELS[1].encode()] * num
    assert (rows.dtype, labels.dtype) == (messages.DT_FLOAT, messages.DT_STRING)


async def test_outputs_are_those_of_the_filter_and_a_member_is_a_model(client):
    reply, _ = await client.predict({"image": files(IMAGE)}, output_filter=["label"])
    assert list(reply.outputs) == ["label"]
    reply, _ = await client.predict({"image": files(IMAGE)}, name="imagenette.densenet169")
    assert list(reply.outputs["label"].string_val) == [LABELS[4].encode()]


@cases(
    "fields, says",
    ({"inputs": {"photo": files(IMAGE)}}, "no input 'photo'; it has image and pixels"),
    ({"inputs": {}}, "0 inputs; send one, image or pixels"),
    ({"inputs": {"image": files(b"no")}}, "image 0 of 1"),
    ({"inputs": {"image": tensor("DT_STRING", [1], tensor_content=b"x")}}, "into string_val"),
    ({"inputs": {"image": files(IMAGE, shape=[2])}}, "its shape [2] means 2"),
    ({"inputs": {"pixels": tensor("DT_FLOAT", [1, *PIXELS])}}, "FP32; it is UINT8"),
    ({"inputs": {"pixels": tensor("DT_UINT8", [1, 2, 2, 3])}}, "in the order blue, green, red"),
    ({"inputs": {"pixels": tensor("DT_UINT8", [1, *PIXELS], int_val=[1])}}, "1 values"),
    ({"inputs": {"pixels": tensor("DT_UINT8", [-1])}}, "shape has -1"),
    ({"inputs": {"pixels": tensor("DT_INVALID", [1])}}, "datatype is 'INVALID'"),
    ({"inputs": {"image": files(IMAGE)}, "output_filter": ["x"]}, "has no output 'x'"),
    ({"inputs": {"image": files(IMAGE)}, "spec": {"signature_name": "x"}}, "is serving_default"),
    (
        {"inputs": {"pixels": tensor("DT_UINT8", [1, *PIXELS], int_val=[1] * SIZE * SIZE * 3)}},
        "send tensors as bytes (raw_input_contents, tensor_content)",
    ),
)
async def test_what_is_no_request(client, fields, says):
    _, context = await client.call("Predict", **fields)
    assert context.code() is CODE.INVALID_ARGUMENT
    assert says in context.details()


@cases(
    "spec, code",
    ({}, None),
    ({"version": {"value": 0}}, None),  # the latest, to OpenVINO Model Server's client
    ({"version": {"value": 1}}, None),
    ({"version_label": VERSION}, None),
    ({"version": {"value": 2}}, CODE.NOT_FOUND),
    ({"version_label": "stable"}, CODE.NOT_FOUND),
)
@pytest.mark.parametrize("method", TENSORFLOW_METHODS)
async def test_a_version_is_the_number_one_or_the_fingerprint(client, method, spec, code):
    fields = {"inputs": {"image": files(IMAGE)}} if method == "Predict" else {}
    _, context = await client.call(method, spec=spec, **fields)
    assert context.code() is code
    _, context = await client.call(method, name="nothing", spec=spec, **fields)
    assert context.code() is CODE.NOT_FOUND


async def test_a_model_describes_itself(graph, client):
    reply, _ = await client.call("GetModelMetadata", metadata_field=["signature_def"])
    signatures = messages.SignatureDefMap()
    assert reply.metadata["signature_def"].Unpack(signatures)
    signature = signatures.signature_def["serving_default"]
    found = {
        name: (info.dtype, [dim.size for dim in info.tensor_shape.dim])
        for tensors in (signature.inputs, signature.outputs)
        for name, info in tensors.items()
    }
    assert found == {
        "image": (messages.DT_STRING, [-1]),
        "pixels": (messages.DT_UINT8, [-1, *PIXELS]),
        "probabilities": (messages.DT_FLOAT, [-1, 10]),
        "label": (messages.DT_STRING, [-1]),
    }
    _, context = await client.call("GetModelMetadata", metadata_field=["other"])
    assert "there is signature_def" in context.details()
    graph.members["resnet50"].raises = NotReadyError("resnet50 is starting")
    _, context = await client.call("GetModelStatus")
    assert context.code() is CODE.UNAVAILABLE
    assert "resnet50 is starting" in context.details()
    graph.members["resnet50"].raises = None
    (status,) = (await client.call("GetModelStatus"))[0].model_version_status
    assert (status.version, status.state, status.status.error_code) == (1, 30, 0)


async def test_keys_are_asked_for_and_calls_are_counted(graph, client, told):
    await client.predict({"image": files(IMAGE)})
    path = "/tensorflow.serving.PredictionService/Predict"
    assert told.of(REQUESTS) == {(path, "200", "classify"): 1}
    graph.service.keys = Keys(["k" * 32])
    for method in TENSORFLOW_METHODS:
        _, context = await client.call(method)
        assert context.code() is CODE.UNAUTHENTICATED, method
        key = {"authorization": f"Bearer {'k' * 32}"}
        _, context = await client.call(method, "nothing", key)
        assert context.code() is CODE.NOT_FOUND, method


async def test_a_message_that_is_none(client):
    context = context_of()
    await client._methods._tensorflow.call("Predict", stream_of(b"\xff\xff"), context)
    assert context.code() is CODE.INVALID_ARGUMENT
    assert "app/grpc/tensorflow_serving.proto" in context.details()
