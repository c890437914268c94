"""The embedding of one member beside the labels: over HTTP, gRPC and the client."""

from typing import Any

import cv2
import httpx
import numpy as np
import pytest

from app.answers import Fault
from app.graph.request import RequestBody, RequestOptions
from app.grpc.interface import GrpcInterface
from app.grpc.tandem_pb2 import ClassifyRequest
from app.http.api import create_api
from app.serve.gateway import assemble
from app.serve.replica import classify_many
from app.serve.set_stages import RemoteMember
from app.settings import Settings
from app.stages.classifier import Classifier
from app.telemetry.metrics import RequestObserver
from models.model_set import load_model_set
from models.openvino_network import compile_with, features_network, read_network
from tandem_client import AsyncClient
from tests.support.cases import cases
from tests.support.fakes import handle_of
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.plans import planned
from tests.support.tiny_networks import SIZE, picture, write_tiny_set

GREY = cv2.imencode(".png", np.full((30, 30, 3), (50, 100, 200), np.uint8))[1].tobytes()
POOLED = np.array([50, 100, 200], np.float32) / 255  # what a tiny network's classes are scored by
FILES = [GREY, picture("red"), picture("blue")]
POOLS: list[Any] = [POOLED, [0, 0, 1], [1, 0, 0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_set(tmp_path_factory.mktemp("set") / "tiny")


def service_of(folder, **more):
    return assemble(Settings(model_set=str(folder), compile_cache=None, **more)).service


@pytest.fixture(scope="module")
def service(folder):
    return service_of(folder)


def client_of(service) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_api(service))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_an_answer_has_the_pooled_features_of_the_same_pass_where_they_are_asked(service):
    http = client_of(service)
    plain = (await http.post("/v1/classify", content=GREY)).json()
    answer = (await http.post("/v1/classify?embedding=unsure", content=GREY)).json()
    assert answer.pop("embedding") == pytest.approx(POOLED.tolist(), abs=1e-5)
    for name in ("request_id", "timings_ms"):
        del plain[name], answer[name]
    assert answer == plain
    form = [("files", ("f", file)) for file in [*FILES, b"no image"]]
    answers = (await http.post("/v1/classify?embedding=sure", files=form)).json()["results"]
    for row, pooled in zip(answers[:3], POOLS, strict=True):
        assert row["embedding"] == pytest.approx(pooled, abs=1e-5)
    assert answers[3]["error"]["code"] == "not_an_image"
    params = {"embedding": "sure", "regions": "[[0, 0, 9, 9], [0.5, 0.5, 0.5, 0.5]]"}
    both = (await http.post("/v1/classify", content=GREY, params=params)).json()["results"]
    for row in both:
        assert row["embedding"] == pytest.approx(POOLED.tolist(), abs=1e-5)


async def test_grpc_and_the_client_have_it_too(service):
    message = ClassifyRequest(images=FILES, embedding="sure").SerializeToString()
    reply = await GrpcInterface(service).classify(stream_of(message), context_of())
    for result, pooled in zip(reply.results, POOLS, strict=True):
        np.testing.assert_allclose(result.classified.embedding, pooled, atol=1e-5)
    transport: Any = httpx.ASGITransport(create_api(service))
    client = AsyncClient("http://tandem", transport=transport)
    answer = await client.classify(GREY, embedding="sure")
    np.testing.assert_allclose(answer.embedding, POOLED, atol=1e-5)
    assert (await client.classify(GREY)).embedding == ()


async def test_who_has_none_says_how(tmp_path, service, monkeypatch):
    unknown = await client_of(service).post("/v1/classify?embedding=third", content=GREY)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (422, "bad_parameter")
    assert "embedding is 'third'; tiny has sure, unsure" in unknown.json()["error"]["message"]
    monkeypatch.setattr("models.openvino_network._scoring_layer", lambda _: None)
    for policy in ("all", "any"):
        own = service_of(write_tiny_set(tmp_path / policy), answer_policy=policy)
        http = client_of(own)
        for _ in range(2):  # a member is not at fault
            refused = await http.post("/v1/classify?embedding=sure", content=GREY)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "not_offered")
            assert "embedding of sure is asked for, and it has none: " in error["message"]
            assert "no place to cut: looked for a fully connected layer" in error["message"]
            answer = (await http.post("/v1/classify", content=GREY)).json()
            assert len(answer["members"]) == 2


async def test_the_cache_keeps_none_and_gives_none(folder):
    http = client_of(service_of(folder, cache="local"))
    for query, has in (("", False), ("", False), ("?embedding=sure", True), ("", False)):
        answer = (await http.post(f"/v1/classify{query}", content=GREY)).json()
        assert ("embedding" in answer) is has
        assert len(answer.get("embedding", [])) == (3 if has else 0)


@cases("name, ask", ("sure", "plan=fast"), ("unsure", "plan=full"), ("unsure", ""))
async def test_the_fast_plan_answers_if_it_asks_the_member_about_every_image(tmp_path, name, ask):
    steps = (("sure",), 0.9), (("unsure",), None)
    folder = planned(write_tiny_set(tmp_path / "tiny"), *steps)
    http = client_of(service_of(folder, plan="fast"))
    answer = (await http.post(f"/v1/classify?embedding={name}&{ask}", content=GREY)).json()
    assert answer["embedding"] == pytest.approx(POOLED.tolist(), abs=1e-5)
    assert answer["plan"] == ("fast" if name == "sure" else "full")
    refused = await http.post("/v1/classify?embedding=unsure&plan=fast", content=GREY)
    assert refused.status_code == 400
    assert "which the fast plan does not ask about every image" in refused.text


async def test_a_member_elsewhere_sends_its_features(tiny_set):
    member = Classifier(Settings(model_set=str(tiny_set), compile_cache=None), "sure")

    class Stage:
        async def classify_many(self, message: bytes) -> bytes:
            return await classify_many(member, message)

    remote = RemoteMember(handle_of(Stage()))
    images = np.random.default_rng(2).integers(0, 256, (2, SIZE, SIZE, 3), np.uint8)
    answer = await remote.classify(images, 9, "bulk", has_features=True)
    assert answer.features is not None
    np.testing.assert_allclose(answer.features, images.mean(axis=(1, 2)) / 255, atol=1e-5)
    plain = await remote.classify(images, 9, "bulk")
    assert plain.features is None
    np.testing.assert_array_equal(plain.probabilities, answer.probabilities)


async def test_the_bundled_networks_answer_openvinos_own_features():
    own = load_model_set("imagenette")
    service = assemble(Settings(compile_cache=None)).service
    generated = np.random.default_rng(5).integers(0, 256, (40, 60, 3), np.uint8)
    data = cv2.imencode(".png", cv2.resize(generated, (400, 300)))[1].tobytes()
    pixels = own.manifest.inputs.read(data)[None]
    for name in own.manifest.weights:
        options = RequestOptions("r", embedding=name)
        with service.admit(options, RequestObserver()) as admitted:
            async with admitted.arriving():
                pass
            (answer,) = await admitted.answer(RequestBody([data]))
        assert not isinstance(answer, Fault)
        network = features_network(read_network(own.network_path(name, "INT8")), name)
        network.reshape([1, *pixels.shape[1:]])
        compiled = compile_with(network, {"INFERENCE_PRECISION_HINT": "f32"})
        expected = compiled(pixels)[0][0]
        assert answer.embedding is not None
        assert np.abs(np.asarray(answer.embedding) - expected).max() <= 1e-3
        assert len(expected) >= 1024


async def test_the_open_inference_protocol_has_an_output_of_it(service):
    http, grey = client_of(service), np.full((2, SIZE, SIZE, 3), (50, 100, 200), np.uint8)
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": list(grey.shape)}
    inputs = [tensor | {"data": grey.ravel().tolist()}]

    async def infer(model: str, outputs: list[str], **parameters: str) -> httpx.Response:
        body: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
        if outputs:
            body["outputs"] = [{"name": name} for name in outputs]
        return await http.post(f"/v2/models/{model}/infer", json=body)

    for model, outputs, parameters in (
        ("tiny", ["probabilities", "embedding"], {"embedding": "unsure"}),
        ("tiny", [], {"embedding": "unsure"}),
        ("tiny.unsure", ["embedding"], {}),
    ):
        answer = (await infer(model, outputs, **parameters)).json()
        names = outputs or ["probabilities", "label", "embedding"]
        assert [output["name"] for output in answer["outputs"]] == names
        embedding = answer["outputs"][-1]
        assert (embedding["datatype"], embedding["shape"]) == ("FP32", [2, 3])
        np.testing.assert_allclose(np.reshape(embedding["data"], (2, 3)), [POOLED] * 2, atol=1e-5)
    plain = (await infer("tiny", [])).json()
    assert [output["name"] for output in plain["outputs"]] == ["probabilities", "label"]
    for model, parameters, problem in (
        ("tiny", {}, "output embedding is of one member: name it in the parameter embedding"),
        ("tiny", {"embedding": "third"}, "embedding is 'third'; tiny has sure, unsure"),
        ("tiny.sure", {"embedding": "unsure"}, "the model tiny.sure has its own alone"),
    ):
        refused = await infer(model, ["embedding"], **parameters)
        assert 400 <= refused.status_code < 500
        assert problem in refused.json()["error"]
