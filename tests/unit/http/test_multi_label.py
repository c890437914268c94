"""A multi-label set over HTTP: lists of labels, the threshold, and the Open Inference Protocol."""

import numpy as np
import pytest

from app.http.api import create_api
from tests.support.asgi_client import asgi_client
from tests.support.cases import cases
from tests.support.scored_service import scored_service
from tests.support.scored_sets import (
    LABELS,
    PICTURES,
    average_score,
    scored_picture,
    write_scored_set,
)

CLASSIFY = "/v1/classify"
INFER = "/v2/models/scored/infer"
WEIGHTS = {"steep": 1.0, "flat": 1.0}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory):
    return create_api(scored_service(str(write_scored_set(tmp_path_factory.mktemp("scored")))))


@pytest.fixture
def client(api):
    return asgi_client(api)


def binary(*names: str, parameters: dict[str, object] | None = None) -> dict[str, object]:
    """Return a request of pixels: of one-coloured pictures, as JSON."""
    pixels = np.stack([np.full((16, 16, 3), PICTURES[name][0], np.uint8) for name in names])
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": list(pixels.shape)}
    tensor["data"] = pixels.ravel().tolist()
    return {"inputs": [tensor], "parameters": parameters or {}}


async def test_labels_above_the_threshold(client):
    told = (await client.post(CLASSIFY, content=scored_picture("cyan"))).json()
    assert [one["label"] for one in told["predictions"]] == list(PICTURES["cyan"][1])
    assert (told["threshold"], told["members"]["steep"]["label"]) == (0.5, "has blue")


@pytest.mark.parametrize("query", ["", "?top_k=3", "?top_k=3&threshold=0.5"])
async def test_an_answer_may_have_no_label(client, query):
    """Two of these do not go by way of FastAPI."""
    told = (await client.post(CLASSIFY + query, content=scored_picture("black"))).json()
    assert (told["predictions"], told["members"]["steep"]) == ([], {"predictions": []})
    assert told["agreement"] is True


async def test_a_form_has_a_list_for_each_file(client):
    files = [("files", (name, scored_picture(name))) for name in ("black", "red")]
    told = (await client.post(CLASSIFY, files=files, params={"threshold": 0.3})).json()
    none, red = told["results"]
    assert (none["predictions"], none["threshold"]) == ([], 0.3)
    assert [one["label"] for one in red["predictions"]] == ["has red"]


@cases(
    "value, says",
    *((v, "give a score above 0 and below 1") for v in ("0", "1", "-0.5", "2", "nan", "inf")),
    ("x", "threshold is 'x'"),
)
async def test_a_threshold_that_is_none(client, value, says):
    answer = await client.post(CLASSIFY, content=scored_picture("red"), params={"threshold": value})
    assert answer.status_code == 422
    assert says in answer.json()["error"]["message"]


async def test_the_models_say_what_their_answers_are_and_tensors_have_every_score(client):
    told = (await client.get("/v1/models")).json()
    assert (told["task"], told["threshold"]) == ("multi_label", 0.5)
    outputs = (await client.get("/v2/models/scored")).json()["outputs"]
    shapes = {output["name"]: output["shape"] for output in outputs}
    assert shapes == {"probabilities": [-1, 3], "label": [-1, -1]}
    names = ("white", "black", "red")
    probabilities, label = (await client.post(INFER, json=binary(*names))).json()["outputs"]
    expected = np.stack([average_score(PICTURES[name][0], WEIGHTS) for name in names])
    np.testing.assert_allclose(np.reshape(probabilities["data"], (3, 3)), expected, atol=1e-5)
    assert label["shape"] == [3, 3]
    white, black, red = np.reshape(label["data"], (3, 3)).tolist()
    assert set(white) == set(LABELS)
    assert black == ["", "", ""]
    assert red == ["has red", "", ""]


@cases("parameters, shape", ({"threshold": 0.999, "top_k": 2}, [2, 1]), ({"top_k": 2}, [2, 2]))
async def test_tensors_with_a_threshold_and_fewer_labels(client, parameters, shape):
    asked = binary("white", "black", parameters=parameters)
    _, label = (await client.post(INFER, json=asked)).json()["outputs"]
    assert label["shape"] == shape
    assert shape == [2, 2] or label["data"] == ["", ""]
    refused = await client.post(INFER, json=binary("white", parameters={"threshold": 2}))
    assert (refused.status_code, "above 0 and below 1" in refused.json()["error"]) == (422, True)
