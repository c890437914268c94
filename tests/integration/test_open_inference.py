"""The Open Inference Protocol through Serve's proxy, every stage a deployment of its own."""

from typing import Any

import cv2
import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from app.grpc.open_inference_pb2 import (
    ModelInferRequest,
    RepositoryIndexRequest,
    ServerReadyRequest,
)
from models.manifest import read_manifest
from models.model_set import load_model_set
from tests.support.open_inference import (
    HEADER_LENGTH,
    binary_request,
    elements,
    outputs_of,
    with_header,
)
from tests.support.open_inference_stub import inference_stub
from tests.support.services.deployed import MEMBERS
from tests.support.tiny_networks import expected_label, picture

SIZE = 64  # the tiny set's


@pytest.fixture(scope="module")
def model(served) -> str:
    return read_manifest(served.model_set).name


def pixels_of(*colors: str) -> np.ndarray:
    files = [np.frombuffer(picture(color, SIZE), np.uint8) for color in colors]
    decoded: list[Any] = [cv2.imdecode(data, cv2.IMREAD_COLOR) for data in files]
    return np.stack(decoded)


def test_encoded_and_decoded_images(client, model):
    colors = ["red", "blue", "green"]
    expected = [expected_label(color) for color in colors]
    array = pixels_of(*colors)
    in_json = {"name": "pixels", "datatype": "UINT8", "shape": array.shape, "data": array.tolist()}
    for body, headers in (
        binary_request(elements(*map(picture, colors)), shape=[3, 1]),
        binary_request(array.tobytes(), name="pixels", datatype="UINT8", shape=[*array.shape]),
        with_header({"inputs": [in_json]}),
    ):
        answer = client.post(f"/v2/models/{model}/infer", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found = outputs_of(answer)
        assert found["label"] == expected
        assert np.array(found["probabilities"]).reshape(3, -1).sum(1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("member", MEMBERS)
def test_a_member_alone(client, model, member):
    image = picture("blue")
    own = client.post("/v1/classify", content=image).json()["members"][member]
    answer = client.post(
        f"/v2/models/{model}.{member}/infer", content=image, headers={HEADER_LENGTH: "0"}
    )
    found = outputs_of(answer)
    assert found["label"] == elements(own["label"].encode())
    row = np.frombuffer(found["probabilities"], "<f4")
    assert row.max() == pytest.approx(own["probability"], abs=1e-6)


def test_errors_have_the_protocols_form_through_the_proxy(client, model):
    body, headers = binary_request(elements(picture("red"), b"no"), shape=[2])
    answer = client.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    assert answer.status_code == 400
    assert "image 1 of 2" in answer.json()["error"]
    assert client.get("/v2/health/ready").json() == {"ready": True}


def test_the_methods_over_grpc(served, model):
    with grpc.insecure_channel(f"127.0.0.1:{served.config.grpc_port}") as channel:
        stub = inference_stub(channel)
        assert stub.ServerReady(ServerReadyRequest(), timeout=60).ready
        health = HealthStub(channel).Check(HealthCheckRequest(), timeout=60)
        assert health.status == HealthCheckResponse.SERVING
        index = stub.RepositoryIndex(RepositoryIndexRequest(), timeout=60)
        assert [one.name for one in index.models] == [model, *(f"{model}.{m}" for m in MEMBERS)]
        image = ModelInferRequest.InferInputTensor(name="image", datatype="BYTES", shape=[1])
        request = ModelInferRequest(
            model_name=model, inputs=[image], raw_input_contents=[elements(picture("red"))]
        )
        reply = stub.ModelInfer(request, timeout=60)
        version = load_model_set(str(served.model_set)).fingerprint()
        assert reply.model_version == version
        assert reply.raw_output_contents[1] == elements(expected_label("red").encode())
        request.model_version = "9"
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request, timeout=60)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert f"has version {version}, which 0 and 1 stand for" in caught.value.details()
