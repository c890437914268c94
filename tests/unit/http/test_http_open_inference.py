"""Inference under /v2, with the real service in front of members of the test."""

import numpy as np
import pytest

from app.errors import NotReadyError
from tests.support.open_inference import (
    FIRST,
    HEADER_LENGTH,
    IMAGE,
    LABELS,
    MEAN,
    MODEL,
    SECOND,
    VERSION,
    Graph,
    asked,
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


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def client(graph):
    return client_of(graph)


async def test_encoded_images_get_probabilities_and_labels(client):
    answer = await infer(client, images(IMAGE, IMAGE, id="mine"))
    assert answer.status_code == 200
    body = answer.json()
    assert (body["model_name"], body["model_version"], body["id"]) == (
        "imagenette",
        VERSION,
        "mine",
    )
    probabilities, label = body["outputs"]
    assert (probabilities["name"], probabilities["datatype"]) == ("probabilities", "FP32")
    assert probabilities["shape"] == [2, 10]
    assert probabilities["data"] == pytest.approx([*MEAN, *MEAN], abs=1e-7)
    expected = {"name": "label", "datatype": "BYTES", "shape": [2], "data": [LABELS[1]] * 2}
    assert label == expected


async def test_the_answer_is_that_of_v1(client):
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
    found = outputs_of(answer)
    assert list(found) == ["label", "probabilities"]
    assert found["label"] == elements(LABELS[1].encode())
    assert np.frombuffer(found["probabilities"], "<f4") == pytest.approx(MEAN, abs=1e-7)
    answer = await infer(client, images(IMAGE, outputs=asked("label")))
    assert outputs_of(answer) == {"label": [LABELS[1]]}


async def test_the_raw_form_takes_one_image_and_answers_in_binary(client):
    answer = await infer(client, (IMAGE, {HEADER_LENGTH: "0"}))
    found = outputs_of(answer)
    assert found["label"] == elements(LABELS[1].encode())
    assert len(found["probabilities"]) == 40


async def test_classification_strings(client):
    outputs = asked("probabilities", classification=2)
    answer = await infer(client, images(IMAGE, IMAGE, outputs=outputs))
    (output,) = answer.json()["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2, 2])
    best = [f"{MEAN[index]:f}:{index}:{LABELS[index]}" for index in (1, 4)]
    assert output["data"] == best * 2
    more = await infer(client, images(IMAGE, outputs=asked("probabilities", classification=9999)))
    assert more.json()["outputs"][0]["shape"] == [1, 10]


async def test_top_k_asks_for_several_labels(client):
    answer = await infer(client, images(IMAGE, parameters={"top_k": 3}, outputs=asked("label")))
    (output,) = answer.json()["outputs"]
    assert (output["shape"], output["data"]) == ([1, 3], [LABELS[1], LABELS[4], LABELS[3]])


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
    assert body["parameters"] == missing  # whether it is sure was measured of all members
    assert body["outputs"][0]["data"] == pytest.approx(SECOND, abs=1e-7)


async def test_the_cascade_decides_each_image_by_itself():
    graph = Graph(cascade_margin=0.5)
    graph.members["resnet50"].rows = {7: [0.0, 1.0] + [0.0] * 8, 9: FIRST}
    array = drawn(2)
    array[1] = 9
    rows = np.array(outputs_of(await infer(client_of(graph), pixels(array)))["probabilities"])
    assert rows[:10].tolist() == [0.0, 1.0] + [0.0] * 8
    assert rows[10:] == pytest.approx(MEAN, abs=1e-7)
    assert graph.members["densenet169"].seen == [[9]]


async def test_time_and_lane_are_the_requests(graph, client):
    await infer(client, images(IMAGE))
    await infer(client, images(IMAGE, IMAGE))
    await infer(client, images(IMAGE, parameters={"priority": 6}))
    await infer(client, images(IMAGE, IMAGE, parameters={"priority": 1, "timeout": 2_000_000}))
    await infer(client, images(IMAGE), priority="u=6")
    assert graph.decoder.lanes == ["interactive", "bulk", "bulk", "interactive", "bulk"]
    assert 1.5 < graph.members["resnet50"].asked[3][1] <= 2.0
    answer = await infer(client, images(IMAGE, parameters={"timeout": 1}))
    assert error_of(answer, 504)
