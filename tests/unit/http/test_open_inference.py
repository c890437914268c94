"""Inference under /v2, KServe's V1 and base64, with the real service before members of the test."""

import base64
import gzip
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.errors import NotReadyError
from app.oip.bodies import MAX_JSON_BYTES
from app.oip.inference import Inference
from app.telemetry.metric_table import REQUEST_MS, REQUESTS
from app.telemetry.metrics import CLASSIFY
from models.ensemble import average
from models.model_set import load_model_set
from tests.support.asgi_client import KEY, write_keys
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


PREDICT = "/v1/models/imagenette:predict"
BASE64_PREDICT: dict[str, Any] = {"name": "image", "datatype": "BYTES"}
BASE64_PREDICT |= {"parameters": {"content_type": "base64"}}  # as MLServer has it


def b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


def instances(*each: Any, **more: Any) -> dict[str, Any]:
    return {"instances": list(each), **more}


@pytest.mark.parametrize(
    "path", [PREDICT, "/v1/models/imagenette/versions/1:predict", "/v1/models/imagenette%3Apredict"]
)
@pytest.mark.parametrize("row", [b64(IMAGE), {"image": b64(IMAGE)}])
async def test_every_instance_gets_a_row_of_the_outputs(client, path, row):
    answer = await client.post(path, json=instances(row, row, signature_name="serving_default"))
    assert answer.status_code == 200, answer.text
    predictions = answer.json()["predictions"]
    assert [set(each) for each in predictions] == [{"probabilities", "label"}] * 2
    for each in predictions:
        assert each["label"] == LABELS[1]
        assert each["probabilities"] == pytest.approx(MEAN, abs=1e-7)


async def test_parameters_gzip_and_large_photos_are_taken(client):
    asked = instances(b64(IMAGE), parameters={"top_k": 3})
    (row,) = (await client.post(PREDICT, json=asked)).json()["predictions"]
    assert row["label"] == [LABELS[1], LABELS[4], LABELS[3]]
    text = error_of(await client.post(PREDICT, json=asked | {"parameters": {"top_k": 99}}), 422)
    assert "99" in text
    body = gzip.compress(json.dumps(instances(b64(IMAGE + bytes(300_000)))).encode())
    answer = await client.post(PREDICT, content=body, headers={"content-encoding": "gzip"})
    assert answer.status_code == 200, answer.text


async def test_long_json_is_for_files_and_not_for_numbers():
    graph = Graph(max_body_bytes=4 * MAX_JSON_BYTES, max_bytes_in_flight=8 * MAX_JSON_BYTES)
    client, large = client_of(graph), b64(IMAGE + bytes(MAX_JSON_BYTES))
    assert (await client.post(PREDICT, json=instances(large))).status_code == 200
    numbers = b'{"instances": [' + b"1," * MAX_JSON_BYTES + b"1]}"
    text = error_of(await client.post(PREDICT, content=numbers), 413)
    assert f"{len(numbers)} bytes of JSON" in text
    in_v2 = {"inputs": [BASE64_PREDICT | {"shape": [1], "data": [large["b64"]]}]}
    assert (await client.post(f"{MODEL}/infer", json=in_v2)).status_code == 200


@cases(
    "body, status, says",
    (b"", 400, 'at character 0; send {"instances": [{"b64": "..."}]}'),
    (b"\xff\xd8\xff", 400, "no JSON"),
    (b"[]", 400, "the request is []; it is an object"),
    (b'{"images": {"b64": ""}}', 400, 'instances is None; send {"instances"'),
    (b'{"inputs": {"b64": ""}}', 400, "image 0 of 1"),
    (b'{"inputs": {}}', 400, "has 0 inputs"),
    (b'{"inputs": {"image": []}}', 400, "send one or more"),
    (b'{"inputs": {"image": [[1, 2]]}}', 400, 'image 0 is [1, 2]; send {"inputs"'),
    (b'{"inputs": {"x": [1]}}', 400, "has no input 'x'; it has image and pixels"),
    (b'{"inputs": {"pixels": [1]}}', 400, "in the order blue, green, red"),
    (b'{"inputs": [], "instances": []}', 400, "give one of them"),
    (b'{"instances": [], "signature_name": "x"}', 400, "there is serving_default"),
    (b'{"instances": []}', 400, "send one or more"),
    (b'{"instances": [[1, 2]]}', 400, 'instance 0 is [1, 2]; send {"instances"'),
    (b'{"instances": [{"b64": 7}]}', 400, "instance 0 is"),
    (b'{"instances": [{"b64": "Z29vZA==", "x": 1}, "x"]}', 400, "instance 1 is 'x'"),
    (b'{"instances": [{"b64": "Z29v!A=="}]}', 400, "element 0, 'Z29v!A==', is no base64"),
    (b'{"instances": [{"b64": "Z29v\\nZA=="}]}', 400, "no line breaks"),
    (b'{"instances": [{"b64": "Z29vZ"}]}', 400, "is no base64"),
    (b'{"instances": [{"b64": "\\u00e4"}]}', 400, "is no base64"),
    (b'{"instances": [{"b64": "data:image/jpeg;base64,Z29vZA=="}]}', 400, "after the comma"),
    (b'{"instances": [{"b64": ""}]}', 400, "image 0 of 1"),
    (b'{"instances": [' + b",".join([b'{"b64": "Z29vZA=="}'] * 5) + b"]}", 413, "limit is 4"),
    (b'{"instances": [{"b64": "Z29vZA=="}], "parameters": 7}', 400, "parameters is 7"),
)
async def test_what_is_no_request_is_told_what_to_send(client, body, status, says):
    assert says in error_of(await client.post(PREDICT, content=body), status)


async def test_errors_keys_and_limits_are_those_of_the_other_ways(graph, tmp_path):
    client, good = client_of(graph), instances(b64(IMAGE))
    assert "no model" in error_of(await client.post("/v1/models/x:predict", json=good), 404)
    for path in (PREDICT, "/v1/models/imagenette/versions/1:predict"):
        assert "GET" in error_of(await client.get(path), 405)
    large = await client.post(PREDICT, content=bytes(500_001))
    assert "the limit is 500000" in error_of(large, 413)
    late, coded = {"x-request-timeout-seconds": "0"}, {"content-encoding": "br"}
    error_of(await client.post(PREDICT, json=good, headers=late), 422)
    error_of(await client.post(PREDICT, json=good, headers=coded), 415)
    graph.members["resnet50"].raises = NotReadyError("resnet50 is starting")
    assert "starting" in error_of(await client.post(PREDICT, json=good), 503)
    guarded = client_of(Graph(api_keys_file=write_keys(tmp_path)))
    error_of(await guarded.post(PREDICT, json=good), 401)
    key = {"authorization": f"Bearer {KEY}"}
    assert (await guarded.post(PREDICT, json=good, headers=key)).status_code == 200


async def test_sagemakers_path_takes_an_image_as_v1_does_and_json_for_the_first_set(client, graph):
    by_v1 = (await client.post("/v1/classify?top_k=2", content=IMAGE)).json()["predictions"]
    answer = await client.post("/invocations?top_k=2", content=IMAGE)
    assert answer.json()["predictions"] == by_v1
    form = await client.post("/invocations", files=[("files", IMAGE), ("files", IMAGE)])
    assert len(form.json()["results"]) == 2
    good = instances(b64(IMAGE))
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        content, headers = json.dumps(good), {"content-type": kind}
        answer = await client.post("/invocations", content=content, headers=headers)
        assert answer.json() == (await client.post(PREDICT, json=good)).json()
    refused = await client.post("/invocations", json={"instances": 7})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_tensor")
    assert (await client.get("/invocations")).status_code == 405
    assert (await client.get("/ping")).json() == {"ready": True}
    assert "/invocations" in CLASSIFY

    async def not_ready() -> None:
        raise NotReadyError("densenet169 is starting")

    graph.service.check_all_ready = not_ready
    assert (await client.get("/ping")).status_code == 503


@pytest.mark.parametrize("path", [PREDICT, "/v1/models/imagenette/versions/0:predict"])
async def test_columns_are_answered_by_columns(client, path):
    """As OpenVINO Model Server's client sends them, to the latest version."""
    file, array = b64(IMAGE), drawn(2)
    for inputs in (file, [file], {"image": file}, {"image": [file]}, {"image": [[file]]}):
        answer = (await client.post(path, json={"inputs": inputs})).json()
        assert answer["outputs"].keys() == {"probabilities", "label"}
        assert answer["outputs"]["probabilities"] == [pytest.approx(MEAN, abs=1e-7)]
        assert answer["outputs"]["label"] == [LABELS[1]]
    answer = (await client.post(path, json={"inputs": {"pixels": array.tolist()}})).json()
    assert answer["outputs"]["label"] == [LABELS[1]] * 2
    fields = {"inputs": {"image": [file, file]}, "parameters": {"top_k": 2}}
    answer = (await client.post(path, json=fields | {"signature_name": "serving_default"})).json()
    assert answer["outputs"]["label"] == [[LABELS[1], LABELS[4]]] * 2


async def test_a_models_signature_by_both_servers_names(client):
    for path in ("", "/versions/0", "/versions/1", f"/versions/{VERSION}"):
        answer = (await client.get(f"/v1/models/imagenette{path}/metadata")).json()
        assert answer["model_spec"]["name"] == answer["modelSpec"]["name"] == "imagenette"
        signatures = answer["metadata"]["signature_def"]
        for by_name, shape in (("signature_def", "tensor_shape"), ("signatureDef", "tensorShape")):
            signature = signatures[by_name]["serving_default"]
            pixels = signature["inputs"]["pixels"]
            sizes = [dim["size"] for dim in pixels[shape]["dim"]]
            assert (pixels["dtype"], sizes) == ("DT_UINT8", ["-1", str(SIZE), str(SIZE), "3"])
            assert signature["outputs"]["label"]["dtype"] == "DT_STRING"
    for path in ("imagenette/versions/2/metadata", "imagenette/versions/2", "x/metadata"):
        error_of(await client.get(f"/v1/models/{path}"), 404)


async def test_a_model_says_that_it_is_ready(graph, client):
    status = {"error_code": "OK", "error_message": ""}
    versions = [{"version": "1", "state": "AVAILABLE", "status": status}]
    for name in ("imagenette", "imagenette.resnet50"):
        for path in (name, f"{name}/versions/0"):
            answer = (await client.get(f"/v1/models/{path}")).json()
            ready = {"name": name, "ready": True}
            assert answer == ready | {"model_version_status": versions}
    text = error_of(await client.get("/v1/models/imagenett"), 404)
    assert "no model 'imagenett' is served; there are imagenette, imagenette.resnet50" in text
    for path in ("imagenette", "imagenette:explain", "imagenette/versions/1:classify"):
        refused = error_of(await client.post(f"/v1/models/{path}", json={}), 405)
        assert "POST is for NAME:predict alone, use GET, HEAD" in refused

    async def not_ready() -> None:
        raise NotReadyError("densenet169 is starting")

    graph.service.check_ready = not_ready
    refused = await client.get("/v1/models/imagenette")
    assert "densenet169 is starting" in error_of(refused, 503)
    assert refused.headers["retry-after"] == "1"


async def test_the_interface_describes_it_and_metrics_count_it(client):
    description = (await client.get("/openapi.json")).json()
    operation = description["paths"]["/v1/models/{model_name}:predict"]["post"]
    assert {"200", "400", "404", "413", "429", "503", "504"} <= operation["responses"].keys()
    assert "/v1/models/{model_name}:predict" in CLASSIFY


async def test_mlservers_base64_in_v2(client):
    async def asked(shape, data, **more):
        tensor = BASE64_PREDICT | {"shape": shape, "data": data} | more
        return await client.post(f"{MODEL}/infer", json={"inputs": [tensor]})

    text = b64(IMAGE)["b64"]
    for shape, data in (([2], [text, text]), ([2, 1], [[text], [text]])):
        answer = await asked(shape, data)
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"][1]["data"] == [LABELS[1]] * 2
    packed = elements(text.encode(), text.encode())
    parameters = {"content_type": "base64", "binary_data_size": len(packed)}
    two = BASE64_PREDICT | {"shape": [2], "parameters": parameters}
    answer = await infer(client, with_header({"inputs": [two]}, packed))
    assert answer.json()["outputs"][1]["data"] == [LABELS[1]] * 2
    assert "is no base64" in error_of(await asked([1], ["Z29v!A=="]), 400)
    assert "element 0, 7, is no base64" in error_of(await asked([1], [7]), 400)
    unsaid = b64(IMAGE + bytes(50))["b64"]  # mlserver infer drops the parameter
    answer = await asked([2, 1], [unsaid, unsaid], parameters={})
    assert answer.json()["outputs"][1]["data"] == [LABELS[1]] * 2
    for texts in (["no base64, but a text"], [unsaid, "x"], ["ÿØÿà" * 9]):
        refused = await asked([len(texts)], texts, parameters={})
        assert "content_type: base64" in error_of(refused, 400)
