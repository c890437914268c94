"""Bad input under /v2: each its error in the protocol's form; good requests go on."""

import gzip
import json
import zlib

import pytest

from tests.support.open_inference import (
    HEADER_LENGTH,
    IMAGE,
    LABELS,
    MODEL,
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


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def client(graph):
    return client_of(graph)


@pytest.mark.parametrize("top_k", [0, -1, 11])
async def test_a_top_k_out_of_range(graph, client, top_k):
    answer = await infer(client, images(IMAGE, parameters={"top_k": top_k}))
    assert "ask for 1 to 10" in error_of(answer, 422)
    assert graph.decoder.lanes == []


async def test_one_bad_image_fails_its_request_and_is_named(client):
    answer = await infer(client, images(IMAGE, b"no", IMAGE))
    assert "image 1 of 3" in error_of(answer, 400)
    assert "these bytes are no image" in answer.json()["error"]


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
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
        (binary_request(elements(IMAGE), shape=[2**31]), 400, "more elements than 2147483647"),
        (binary_request(elements(IMAGE), shape=[-1]), 400, "sizes are whole numbers from 0"),
        (pixels(drawn()[:, :64]), 400, "has shape [1, 64, 128, 3]; it is [N,128,128,3]"),
        (pixels(drawn()[0]), 400, "has shape [128, 128, 3]"),
        (pixels(drawn(0)), 400, "has no image"),
        (with_header({"inputs": []}), 400, "has 0 inputs; send one, image or pixels"),
        ((b"{", {}), 400, "is no JSON"),
        ((b"{}", {HEADER_LENGTH: "-2"}), 400, "is '-2'"),
        ((bytes(500_001), {HEADER_LENGTH: "0"}), 413, "the limit is 500000"),
    ],
)
async def test_bad_requests_are_told_in_the_protocols_form(graph, client, sent, status, says):
    assert says in error_of(await infer(client, sent), status)
    assert graph.decoder.lanes == []
    assert graph.members["resnet50"].seen == []
    assert (await infer(client, images(IMAGE))).status_code == 200


async def test_both_inputs_at_once(client):
    raw = elements(IMAGE)
    image, more = (
        json.loads(body[: int(headers[HEADER_LENGTH])])["inputs"][0]
        for body, headers in (images(IMAGE), pixels(drawn()))
    )
    sent = with_header({"inputs": [image, more]}, raw + drawn().tobytes())
    assert "has 2 inputs; send one" in error_of(await infer(client, sent), 400)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v2/models/nothing", "there are imagenette, imagenette.resnet50, imagenette.densenet169"),
        (f"{MODEL}/versions/2", "it has version 1"),
        (f"{MODEL}.nothing", "there are imagenette"),
    ],
)
async def test_a_model_or_version_that_is_none(client, path, says):
    assert says in error_of(await infer(client, images(IMAGE), path), 404)
    for way in (path, f"{path}/ready", f"{path}/stats"):
        assert says in error_of(await client.get(way), 404)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", f"{MODEL}/infer", 405)])
async def test_what_is_not_there_is_told_in_the_protocols_form(client, method, path, status):
    assert "/docs" in error_of(await client.request(method, path), status)
    assert "/docs" in error_of(await client.get("/v2/nothing"), 404)


@pytest.mark.parametrize(
    ("coding", "coded"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)],
)
async def test_coded_bodies(client, coding, coded):
    body, headers = images(IMAGE)
    answer = await infer(client, (coded(body), headers), **{"content-encoding": coding})
    assert outputs_of(answer)["label"] == [LABELS[1]]


async def test_a_bomb_is_refused_before_it_is_inflated(graph, client):
    bomb = gzip.compress(bytes(200 * 2**20))
    answer = await infer(client, (bomb, {HEADER_LENGTH: "0"}), **{"content-encoding": "gzip"})
    assert "more than 500000 bytes" in error_of(answer, 413)
    assert graph.service.byte_budget.num_held == 0


ZIPPED = gzip.compress(IMAGE, mtime=0)  # else the time would be in the test's name


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        ("gzip", b"no gzip", 400),
        ("gzip", ZIPPED[:-9], 400),
        ("gzip", ZIPPED * 2, 400),
        ("gzip", b"", 400),
        ("deflate", ZIPPED, 400),
        ("br", IMAGE, 415),
        ("gzip, gzip", IMAGE, 415),
    ],
)
async def test_codings_that_are_damaged_or_unknown(client, coding, body, status):
    answer = await infer(client, (body, {HEADER_LENGTH: "0"}), **{"content-encoding": coding})
    assert error_of(answer, status)


async def test_an_error_of_ours_has_the_protocols_form_too(graph, client):
    graph.members["resnet50"].raises = ValueError("a defect")
    assert "request id" in error_of(await infer(client, images(IMAGE)), 500)
