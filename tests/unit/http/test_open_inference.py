"""Inference under /v2 with the real service before members of the test."""

from dataclasses import replace

import numpy as np
import pytest

from app.errors import NotReadyError
from app.oip.inference import Inference
from app.telemetry.metric_table import REQUEST_MS, REQUESTS
from models.ensemble import average
from models.model_set import load_model_set
from tests.support.cases import cases
from tests.support.open_inference import (
    FIRST,
    HEADER_LENGTH,
    IMAGE,
    LABELS,
    MEAN,
    MODEL,
    SECOND,
    SIZE,
    VERSION,
    Graph,
    asked,
    binary_request,
    client_of,
    drawn,
    elements,
    error_of,
    images,
    infer,
    outputs_of,
    pixels,
    with_header,
)

BOTH = [
    {"name": "image", "datatype": "BYTES", "shape": [1], "data": ["x"]},
    {"name": "pixels", "datatype": "UINT8", "shape": [1], "data": [1]},
]
OTHER = IMAGE + b" of another"


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def client(graph):
    return client_of(graph)


async def test_encoded_images_get_what_v1_answers(client):
    answer = await infer(client, images(IMAGE, IMAGE, id="mine"))
    assert answer.status_code == 200
    body = answer.json()
    named = (body["model_name"], body["model_version"], body["id"])
    assert named == ("imagenette", VERSION, "mine")
    probabilities, label = body["outputs"]
    assert (probabilities["name"], probabilities["datatype"]) == ("probabilities", "FP32")
    assert probabilities["shape"] == [2, 10]
    assert probabilities["data"] == pytest.approx([*MEAN, *MEAN], abs=1e-7)
    assert label == {"name": "label", "datatype": "BYTES", "shape": [2], "data": [LABELS[1]] * 2}
    over_v1 = (await client.post("/v1/classify?top_k=10", content=IMAGE)).json()
    found = outputs_of(await infer(client, images(IMAGE)))
    for prediction in over_v1["predictions"]:
        assert found["probabilities"][prediction["index"]] == prediction["probability"]
    assert found["label"] == [over_v1["predictions"][0]["label"]]


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("is_binary", [False, True])
async def test_pixels_are_not_decoded(graph, client, is_binary, is_nested):
    graph.decoder.raises = AssertionError("the Decoder was asked")
    array = drawn(2)
    array[1] = 9
    data = array.tolist() if is_nested else array.ravel().tolist()
    in_json = with_header(
        {"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": array.shape, "data": data}]}
    )
    answer = await infer(client, pixels(array) if is_binary else in_json)
    assert answer.status_code == 200, answer.text
    assert graph.members["resnet50"].seen == [[7, 9]]
    assert outputs_of(answer)["label"] == [LABELS[1]] * 2


async def test_outputs_are_those_that_were_asked_for_and_binary_on_request(client):
    outputs = [*asked("label", binary_data=True), *asked("probabilities", binary_data=True)]
    answer = await infer(client, images(IMAGE, outputs=outputs))
    assert answer.headers["content-type"] == "application/octet-stream"
    binary = outputs_of(answer)
    assert list(binary) == ["label", "probabilities"]
    assert binary["label"] == elements(LABELS[1].encode())
    assert np.frombuffer(binary["probabilities"], "<f4") == pytest.approx(MEAN, abs=1e-7)
    answer = await infer(client, images(IMAGE, outputs=asked("label")))
    assert outputs_of(answer) == {"label": [LABELS[1]]}
    raw = await infer(client, (IMAGE, {HEADER_LENGTH: "0"}))  # takes one image
    assert outputs_of(raw) == binary


@pytest.mark.parametrize(("count", "shape"), [(2, [2, 2]), (9999, [2, 10])])
async def test_classification_strings_and_several_labels(client, count, shape):
    outputs = [*asked("probabilities", classification=count), *asked("label")]
    sent = images(IMAGE, IMAGE, outputs=outputs, parameters={"top_k": 3})
    strings, labels = (await infer(client, sent)).json()["outputs"]
    assert (strings["datatype"], strings["shape"]) == ("BYTES", shape)
    best = [f"{MEAN[index]:f}:{index}:{LABELS[index]}" for index in (1, 4)]
    assert (strings["data"][:2], strings["data"][shape[1] :][:2]) == (best, best)
    assert labels["shape"] == [2, 3]
    assert labels["data"] == [LABELS[1], LABELS[4], LABELS[3]] * 2


async def test_a_member_alone_gives_its_own_probabilities(graph, client):
    graph.members["densenet169"].raises = AssertionError("the other member was asked")
    answer = await infer(client, images(IMAGE), f"{MODEL}.resnet50/versions/1")
    assert answer.json()["model_name"] == "imagenette.resnet50"
    assert outputs_of(answer)["probabilities"] == pytest.approx(FIRST, abs=1e-7)


async def test_a_degraded_answer_says_so():
    graph = Graph(answer_policy="any", member_patience_s=0)
    graph.members["resnet50"].raises = NotReadyError("gone")
    body = (await infer(client_of(graph), images(IMAGE))).json()
    missing = {"degraded": True, "missing_members": "resnet50: not_ready"}
    assert body["parameters"] == missing | {"sure": False}  # by the bound of the other alone
    assert body["outputs"][0]["data"] == pytest.approx(SECOND, abs=1e-7)


async def test_a_fast_plan_decides_each_image_by_itself():
    graph = Graph()
    graph.members["densenet169"].rows = {7: [0.0, 1.0] + [0.0] * 8, 9: SECOND}
    array = drawn(2)
    array[1] = 9
    answer = (await infer(client_of(graph), pixels(array, parameters={"plan": "fast"}))).json()
    assert answer["parameters"]["plan"] == "fast"
    assert answer["parameters"]["asked"] == "densenet169, resnet50"
    (rows,) = [o["data"] for o in answer["outputs"] if o["name"] == "probabilities"]
    assert rows[:10] == [0.0, 1.0] + [0.0] * 8
    last = load_model_set("imagenette").manifest.fast_plan.steps[-1]
    both = {
        "resnet50": np.array([FIRST], np.float32),
        "densenet169": np.array([SECOND], np.float32),
    }
    expected = average(both, dict.fromkeys(both, 1.0), last.temperature)
    assert rows[10:] == pytest.approx(expected[0], abs=1e-6)
    assert graph.members["resnet50"].seen == [[9]]
    refused = await infer(client_of(graph), pixels(array, parameters={"plan": "quick"}))
    assert "plan is 'quick'; give full or fast" in error_of(refused, 422)


async def test_time_and_lane_are_the_requests(graph, client):
    await infer(client, images(IMAGE))
    await infer(client, images(IMAGE, IMAGE))
    await infer(client, images(IMAGE, parameters={"priority": 6}))
    await infer(client, images(IMAGE, IMAGE, parameters={"priority": 1, "timeout": 2_000_000}))
    await infer(client, images(IMAGE), priority="u=6")
    assert graph.decoder.lanes == ["interactive", "bulk", "bulk", "interactive", "bulk"]
    assert 1.5 < graph.members["resnet50"].asked[3][1] <= 2.0
    assert error_of(await infer(client, images(IMAGE, parameters={"timeout": 1})), 504)


@cases(
    "sent, status, says",
    (images(), 400, "has no image"),
    (images(*[IMAGE] * 5), 413, "5 images, the limit is 4"),
    (images(IMAGE, name="picture"), 400, "no input 'picture'; it has image and pixels"),
    (images(IMAGE, datatype="UINT8"), 400, "has datatype UINT8; it is BYTES"),
    (images(IMAGE, outputs=asked("logits")), 400, "no output 'logits'"),
    (images(IMAGE, outputs=asked("")), 400, "no output ''"),
    (images(IMAGE, outputs=asked("label", "label")), 400, "asked for twice"),
    (images(IMAGE, outputs=asked("label", classification=1)), 400, "of the output probab"),
    (binary_request(elements(IMAGE), shape=[1, 2]), 400, r"has shape [1, 2]; it is [N]"),
    (binary_request(elements(IMAGE), shape=[]), 400, "has shape []"),
    (pixels(drawn()[:, :64]), 400, "has shape [1, 64, 128, 3]; it is [N,128,128,3]"),
    (pixels(drawn()[0]), 400, "has shape [128, 128, 3]"),
    (pixels(drawn(0)), 400, "has no image"),
    (with_header({"inputs": []}), 400, "has 0 inputs; send one, image or pixels"),
    ((b"{", {}), 400, "is no JSON"),
    ((bytes(500_001), {HEADER_LENGTH: "0"}), 413, "the limit is 500000"),
    (with_header({"inputs": BOTH}), 400, "has 2 inputs; send one"),
    *((images(IMAGE, parameters={"top_k": k}), 422, "ask for 1 to 10") for k in (0, -1, 11)),
)
async def test_bad_requests_are_told_in_the_protocols_form(graph, client, sent, status, says):
    assert says in error_of(await infer(client, sent), status)
    assert (graph.decoder.lanes, graph.members["resnet50"].seen) == ([], [])
    assert (await infer(client, images(IMAGE))).status_code == 200


@cases(
    "path, says",
    ("/v2/models/nothing", "there are imagenette, imagenette.resnet50, imagenette.densenet169"),
    (f"{MODEL}/versions/2", "it has version "),
    (f"{MODEL}.nothing", "there are imagenette"),
)
async def test_a_model_or_version_that_is_none(client, path, says):
    assert says in error_of(await infer(client, images(IMAGE), path), 404)
    for way in (path, f"{path}/config", f"{path}/ready", f"{path}/stats"):
        assert says in error_of(await client.get(way), 404)


async def test_a_configuration_is_tritons(client):
    answer = (await client.get(f"{MODEL}/config")).json()
    assert answer["max_batch_size"] == 4  # the setting max_files
    assert answer["input"] == [
        {"name": "image", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
        {"name": "pixels", "data_type": "TYPE_UINT8", "dims": [SIZE, SIZE, 3], "optional": True},
    ]
    assert answer["output"] == [
        {"name": "probabilities", "data_type": "TYPE_FP32", "dims": [10]},
        {"name": "label", "data_type": "TYPE_STRING", "dims": [1]},
    ]
    priorities = {"priority_levels": 8, "default_priority_level": 4}
    assert (answer["dynamic_batching"], answer["response_cache"]) == (priorities, {"enable": False})
    member = (await client.get(f"{MODEL}.resnet50/versions/1/config")).json()
    embedding = {"name": "embedding", "data_type": "TYPE_FP32", "dims": [2048]}
    own = {"name": "imagenette.resnet50", "output": [*answer["output"], embedding]}
    assert member == answer | own
    caching = client_of(Graph(cache="local"))
    assert (await caching.get(f"{MODEL}/config")).json()["response_cache"] == {"enable": True}


async def test_other_errors_have_the_protocols_form_too(graph, client):
    assert "/docs" in error_of(await client.get(f"{MODEL}/infer"), 405)
    assert "/docs" in error_of(await client.get("/v2/nothing"), 404)
    bad = error_of(await infer(client, images(IMAGE, b"no", IMAGE)), 400)
    assert "image 1 of 3" in bad  # fails its request, and is named
    assert "these bytes are no image" in bad
    graph.members["resnet50"].raises = ValueError("a defect")
    assert "request id" in error_of(await infer(client, images(IMAGE)), 500)


async def test_an_answer_of_one_member_says_nothing_of_the_others(graph, client):
    await infer(client, images(IMAGE), f"{MODEL}.resnet50")
    graph.members["densenet169"].raises = NotReadyError("gone")
    assert (await client.get("/readyz")).status_code == 503
    assert "gone" in error_of(await client.get("/v2/health/ready"), 503)
    assert "gone" in error_of(await client.get(f"{MODEL}/ready"), 503)
    assert (await client.get("/v2/health/live")).json() == {"live": True}


async def test_what_the_server_says_of_itself(client):
    told = (await client.get("/v2")).json()
    assert told["name"] == "tandem"
    assert {"binary_tensor_data", "classification", "statistics"} <= set(told["extensions"])
    model = (await client.get(f"{MODEL}/versions/1")).json()
    assert model == (await client.get(MODEL)).json()
    assert model == (await client.get(f"{MODEL}/versions/{VERSION}")).json()
    assert (model["name"], model["versions"]) == ("imagenette", [VERSION, "1"])
    tensors = [(t["name"], t["datatype"], t["shape"]) for t in model["inputs"] + model["outputs"]]
    assert tensors[:2] == [("image", "BYTES", [-1]), ("pixels", "UINT8", [-1, SIZE, SIZE, 3])]
    assert tensors[2:] == [("probabilities", "FP32", [-1, 10]), ("label", "BYTES", [-1])]
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
    assert (len(every), every[0]) == (3, stats)


async def test_statistics_are_of_the_versions_served_at_present(graph):
    """A set was loaded by name, or another version became the main one."""
    inference, models = Inference(graph.service), graph.service.served_models()
    for version in (VERSION, "0123456789ab", "ba9876543210"):
        graph.service.version = version
        graph.service.served_models = lambda of=version: replace(models, model_version=of)
        assert [stats.version for stats in inference.statistics().model_stats] == [version] * 3
        assert {of for _, of in inference._statistics} == {version}


async def test_requests_are_counted_by_their_route(client, told):
    await infer(client, images(IMAGE))
    await infer(client, images(b"no"), f"{MODEL}/versions/1")
    route = "/v2/models/{model_name}"
    version = f"{route}/versions/{{model_version}}"
    good, bad = (f"{route}/infer", "200", "classify"), (f"{version}/infer", "400", "classify")
    assert told.of(REQUESTS) == {good: 1, bad: 1}
    assert told.observed(REQUEST_MS) == {("200",): 1, ("400",): 1}


async def test_the_description_has_every_route(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    way = paths["/v2/models/{model_name}/infer"]["post"]
    assert "application/octet-stream" in way["requestBody"]["content"]
    schema = way["responses"]["400"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ProtocolError"}
    assert len([path for path in paths if path.startswith("/v2")]) == 27


@pytest.fixture
def cached() -> Graph:
    return Graph(cache="local")


@pytest.fixture
def caching(cached):
    return client_of(cached)


def num_asked(cached: Graph) -> int:
    return sum(map(len, cached.members["resnet50"].seen))


async def test_a_hit_is_what_was_computed_and_statistics_tell_it(cached, caching):
    computed, hit, _ = [await infer(caching, images(IMAGE)) for _ in range(3)]
    assert num_asked(cached) == 1
    assert computed.json()["parameters"] == {"sure": False}
    assert hit.json()["parameters"] == {"sure": False, "cached": True}
    assert outputs_of(hit) == outputs_of(computed)
    assert outputs_of(hit)["probabilities"] == pytest.approx(MEAN.tolist(), abs=1e-7)
    (model,) = (await caching.get(f"{MODEL}/stats")).json()["model_stats"]
    told = {name: model["inference_stats"][name]["count"] for name in ("cache_hit", "cache_miss")}
    assert told == {"cache_hit": 2, "cache_miss": 1}
    assert (model["inference_count"], model["execution_count"]) == (3, 1)


async def test_v1_and_v2_have_one_cache_and_a_hit_in_part_is_not_called_one(cached, caching):
    await caching.post("/v1/classify", content=IMAGE)
    answer = await infer(caching, images(IMAGE))
    assert num_asked(cached) == 1
    assert outputs_of(answer)["label"] == [LABELS[1]]
    answer = await infer(caching, images(OTHER, IMAGE))
    assert answer.json()["parameters"] == {"sure": False}
    assert len(outputs_of(answer)["label"]) == 2
    assert num_asked(cached) == 2
    assert (await caching.post("/v1/classify", content=OTHER)).json()["cached"] is True


async def test_pixels_and_members_alone_are_computed(cached, caching):
    for _ in range(2):
        await infer(caching, pixels(drawn()))
        await infer(caching, images(IMAGE), path=f"{MODEL}.resnet50")
    assert num_asked(cached) == 4
