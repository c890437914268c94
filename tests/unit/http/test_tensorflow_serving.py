"""TensorFlow Serving's REST form, KServe's V1, SageMaker's path and MLServer's base64."""

import base64
import gzip
import json
from typing import Any

import pytest

from app.errors import NotReadyError
from app.oip.bodies import MAX_JSON_BYTES
from app.telemetry.metrics import CLASSIFY
from tests.support.asgi_client import KEY, write_keys
from tests.support.cases import cases
from tests.support.open_inference import (
    IMAGE,
    LABELS,
    MEAN,
    MODEL,
    SIZE,
    VERSION,
    Graph,
    client_of,
    drawn,
    elements,
    error_of,
    infer,
    with_header,
)

PREDICT = "/v1/models/imagenette:predict"


BASE64: dict[str, Any] = {"content_type": "base64"}  # as MLServer has it


BASE64_PREDICT = {"name": "image", "datatype": "BYTES", "parameters": BASE64}


def b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def client(graph):
    return client_of(graph)


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
