"""What is told under /v2 of server, models and requests, and to whom."""

from dataclasses import replace

import pytest

from app.errors import NotReadyError
from app.oip.inference import Inference
from app.telemetry.metric_table import REQUEST_MS, REQUESTS
from tests.support.instruments import Instruments
from tests.support.open_inference import (
    IMAGE,
    MODEL,
    SIZE,
    VERSION,
    Graph,
    client_of,
    error_of,
    images,
    infer,
)


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def client(graph):
    return client_of(graph)


async def test_an_answer_of_one_member_says_nothing_of_the_others(graph, client):
    await infer(client, images(IMAGE), f"{MODEL}.resnet50")
    graph.members["densenet169"].raises = NotReadyError("gone")
    assert (await client.get("/readyz")).status_code == 503
    assert "gone" in error_of(await client.get("/v2/health/ready"), 503)
    assert "gone" in error_of(await client.get(f"{MODEL}/ready"), 503)
    assert (await client.get("/v2/health/live")).json() == {"live": True}


async def test_keys_are_asked_for_and_probes_need_none(tmp_path):
    path = tmp_path / "keys"
    path.write_text("k" * 32)
    path.chmod(0o600)
    client = client_of(Graph(api_keys_file=path))
    for way in ("/v2", MODEL, f"{MODEL}/ready", "/v2/models/stats"):
        assert "key" in error_of(await client.get(way), 401)
    assert "key" in error_of(await infer(client, images(IMAGE)), 401)
    for way in ("/v2/health/live", "/v2/health/ready"):
        assert (await client.get(way)).status_code == 200
    answer = await infer(client, images(IMAGE), authorization=f"Bearer {'k' * 32}")
    assert answer.status_code == 200


async def test_what_the_server_says_of_itself(client):
    told = (await client.get("/v2")).json()
    assert told["name"] == "tandem"
    assert {"binary_tensor_data", "classification", "statistics"} <= set(told["extensions"])
    model = (await client.get(f"{MODEL}/versions/1")).json()
    assert model == (await client.get(MODEL)).json()
    assert model == (await client.get(f"{MODEL}/versions/{VERSION}")).json()
    assert (model["name"], model["versions"]) == ("imagenette", [VERSION, "1"])
    assert [(t["name"], t["datatype"], t["shape"]) for t in model["inputs"] + model["outputs"]] == [
        ("image", "BYTES", [-1]),
        ("pixels", "UINT8", [-1, SIZE, SIZE, 3]),
        ("probabilities", "FP32", [-1, 10]),
        ("label", "BYTES", [-1]),
    ]
    index = (await client.post("/v2/repository/index", json={"ready": True})).json()
    names = ["imagenette", "imagenette.resnet50", "imagenette.densenet169"]
    assert [entry["name"] for entry in index] == names
    assert {entry["version"] for entry in index} == {VERSION}
    assert index == (await client.post("/v2/repository/index")).json()
    for name in names:
        told = (await client.get(f"/v2/models/{name}/versions/1/ready")).json()
        assert told == {"name": name, "ready": True}


async def test_statistics_count_what_was_answered_by_the_protocol(client):
    await infer(client, images(IMAGE, IMAGE))
    await infer(client, images(b"no"))
    await client.post("/v1/classify", content=IMAGE)
    (stats,) = (await client.get(f"{MODEL}/stats")).json()["model_stats"]
    assert (stats["inference_count"], stats["execution_count"]) == (2, 1)
    times = stats["inference_stats"]
    assert (times["success"]["count"], times["fail"]["count"]) == (1, 1)
    assert times["success"]["ns"] > times["compute_infer"]["ns"] > 0
    every = (await client.get("/v2/models/stats")).json()["model_stats"]
    assert len(every) == 3
    assert every[0] == stats


async def test_statistics_are_of_the_versions_served_at_present(graph, client):
    """A set was loaded by name, or another version became the main one."""
    assert (await client.get("/v2/models/stats")).json()["model_stats"][0]["version"] == VERSION
    graph.service.version = "0123456789ab"
    models, served = graph.service.served_models(), graph.service
    served.served_models = lambda: replace(models, model_version="0123456789ab")
    for stats in (await client.get("/v2/models/stats")).json()["model_stats"]:
        assert stats["version"] == "0123456789ab"


async def test_versions_that_are_no_longer_served_leave_no_statistics(graph):
    inference, models = Inference(graph.service), graph.service.served_models()
    for version in ("0123456789ab", "ba9876543210"):
        graph.service.version = version
        graph.service.served_models = lambda of=version: replace(models, model_version=of)
        assert len(inference.statistics().model_stats) == 3
        assert {of for _, of in inference._statistics} == {version}


async def test_requests_are_counted_by_their_route(client, told: Instruments):
    await infer(client, images(IMAGE))
    await infer(client, images(b"no"), f"{MODEL}/versions/1")
    route = "/v2/models/{model_name}"
    assert told.of(REQUESTS) == {
        (f"{route}/infer", "200", "classify"): 1,
        (f"{route}/versions/{{model_version}}/infer", "400", "classify"): 1,
    }
    assert told.observed(REQUEST_MS) == {("200",): 1, ("400",): 1}


async def test_the_description_has_every_route(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    way = paths["/v2/models/{model_name}/infer"]["post"]
    assert "application/octet-stream" in way["requestBody"]["content"]
    schema = way["responses"]["400"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ProtocolError"}
    assert len([path for path in paths if path.startswith("/v2")]) == 25
