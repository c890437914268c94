"""Regions of a picture over HTTP, gRPC and the client: each answered as its crop sent alone."""

import json
from typing import Any

import cv2
import httpx
import numpy as np
import pytest

from app.grpc.interface import GrpcInterface
from app.grpc.tandem_pb2 import ClassifyRequest, Region
from app.http.api import create_api
from app.serve.gateway import assemble
from app.serve.replica import decode_many
from app.serve.set_stages import RemoteDecoder
from app.settings import Settings
from app.stages.decoder import HEAVY_PIXELS, Decoder
from models.image_geometry import regions_of
from tandem_client import AsyncClient, BadRequest, Classification, Result
from tests.support.cases import cases
from tests.support.fakes import handle_of
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.tiny_networks import COLORS, SIZE, write_tiny_set

SIDE = 60
# Quarters: blue, green, red, grey.
PICTURE = np.full((SIDE, SIDE, 3), 90, np.uint8)
PICTURE[:30, :30], PICTURE[:30, 30:], PICTURE[30:, :30] = COLORS.values()
FILE = cv2.imencode(".png", PICTURE)[1].tobytes()
QUARTERS: list[list[float]] = [
    [0, 0, 30, 30],
    [30, 0, 30, 30],
    [0, 30, 30, 30],
    [0.5, 0.5, 0.5, 0.5],
]
WITHOUT = ("request_id", "timings_ms")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = write_tiny_set(tmp_path_factory.mktemp("set") / "tiny", num_convolutions=2)
    settings = Settings(model_set=str(folder), compile_cache=None, batch_sizes=(1, 4), max_files=9)
    return assemble(settings).service


@pytest.fixture
def http(service):
    transport = httpx.ASGITransport(create_api(service))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
def client(service):
    transport: Any = httpx.ASGITransport(create_api(service))
    return AsyncClient("http://tandem", transport=transport)


def crop(left: int, top: int) -> bytes:
    return cv2.imencode(".png", PICTURE[top : top + 30, left : left + 30])[1].tobytes()


def plain(answer: dict) -> dict:
    return {name: value for name, value in answer.items() if name not in WITHOUT}


def query(regions: object, **more: object) -> dict[str, object]:
    return {"regions": json.dumps(regions), **more}


async def test_each_region_is_answered_as_its_crop_alone_in_one_batch(service, http):
    usage = service.usage.figures()
    response = await http.post("/v1/classify", content=FILE, params=query(QUARTERS, top_k=2))
    counted = service.usage.figures()
    answer = response.json()
    assert (response.status_code, list(answer)) == (200, ["results", "request_id"])
    results = answer["results"]
    for place, result in zip(((0, 0), (30, 0), (0, 30), (30, 30)), results, strict=True):
        alone = (await http.post("/v1/classify?top_k=2", content=crop(*place))).json()
        assert plain(result) == plain(alone)
    assert [result["predictions"][0]["index"] for result in results[:3]] == [0, 1, 2]
    stages = [stage for result in results for stage in result["timings_ms"]["stages"]]
    assert {stage["batch_size"] for stage in stages if stage["stage"] == "infer"} == {4}
    for name in ("images_arrived", "images_done"):  # each region is an image of work
        assert counted[name] - usage[name] == 4
    decoding = {stage["duration_ms"] for stage in stages if stage["stage"] == "decode"}
    assert len(decoding) == 1  # an even share of one decoding


async def test_a_form_of_one_file_has_regions_too(http):
    form = {"files": ("photo.png", FILE)}
    response = await http.post("/v1/classify", files=form, params=query(QUARTERS[:1]))
    assert [r["predictions"][0]["index"] for r in response.json()["results"]] == [0]
    both = [("files", ("photo.png", FILE))] * 2
    refused = await http.post("/v1/classify", files=both, params=query(QUARTERS))
    assert refused.status_code == 422
    assert "regions are of one picture, and the request has 2" in refused.json()["error"]["message"]
    as_field = await http.post("/v1/classify", files=form, data=query(QUARTERS))
    assert "parameters belong in the address (?regions=...)" in as_field.text


@cases(
    "regions, text",
    ("[[0,0,9,9", "regions is '[[0,0,9,9', which is no JSON; give [[x, y, width, height], ...]"),
    ("[]", "regions is []; give a list of"),
    ("[[0,0,-9,9]]", "region 0 (counted from 0) is [0, 0, -9, 9]"),
    (json.dumps([[0, 0, 9, 9]] * 65), "regions has 65 entries, the limit is 64"),
    (json.dumps([[0, 0, 9, 9]] * 10), "regions has 10 entries, and a request here has 9 images"),
)
async def test_what_is_no_region_is_refused_before_the_body(http, regions, text):
    response = await http.post("/v1/classify", content=FILE, params={"regions": regions})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "bad_parameter")
    assert text in response.json()["error"]["message"]


async def test_a_region_outside_spoils_no_other(http):
    sent = [QUARTERS[1], [31, 0, 30, 30]]
    first, second = (await http.post("/v1/classify", content=FILE, params=query(sent))).json()[
        "results"
    ]
    assert first["predictions"][0]["index"] == 1
    assert second["error"]["code"] == "outside_picture"
    assert "reaches to x 61 and y 30; the picture has 60 x 60" in second["error"]["message"]
    none = await http.post("/v1/classify", content=FILE, params=query(sent[1:]))
    assert (none.status_code, none.json()["error"]["code"]) == (422, "outside_picture")
    damaged = await http.post("/v1/classify", content=FILE[:99], params=query(QUARTERS))
    assert (damaged.status_code, damaged.json()["error"]["code"]) == (400, "corrupt_image")


async def test_grpc_answers_regions_alike(service):
    regions = [Region(x=x, y=y, width=w, height=h) for x, y, w, h in QUARTERS]
    message = ClassifyRequest(images=[FILE], regions=regions).SerializeToString()
    reply = await GrpcInterface(service).classify(stream_of(message), context_of())
    indexes = [result.classified.predictions[0].index for result in reply.results]
    assert (len(indexes), indexes[:3]) == (4, [0, 1, 2])
    two, context = ClassifyRequest(images=[FILE, FILE], regions=regions), context_of()
    await GrpcInterface(service).classify(stream_of(two.SerializeToString()), context)
    assert "regions are of one picture" in context.details()
    bad, context = ClassifyRequest(images=[FILE], regions=[Region(x=1)]), context_of()
    await GrpcInterface(service).classify(stream_of(bad.SerializeToString()), context)
    assert "region 0 (counted from 0) is [1, 0, 0, 0]" in context.details()


async def test_the_client_returns_a_result_for_each_region(client):
    results = await client.classify(FILE, regions=[*QUARTERS, (59, 0, 2, 1)], top_k=1)
    assert all(isinstance(result, Result) for result in results)
    assert [result.index for result in results] == [0, 1, 2, 3, 4]
    assert [result.get().label for result in results[:3]] == [
        "mostly blue",
        "mostly green",
        "mostly red",
    ]
    assert isinstance(results[4].error, BadRequest)
    boxes = np.array([[30.0, 0, 30, 30]], np.float32)  # as a detector has them
    (one,) = await client.classify(FILE, regions=boxes)
    assert one.get().label == "mostly green"
    assert await client.classify(FILE, regions=[]) == []
    assert isinstance(await client.classify(FILE), Classification)
    with pytest.raises(BadRequest, match=r"region 0 \(counted from 0\) is \[-1, 0, 9, 9\]"):
        await client.classify(FILE, regions=[(-1, 0, 9, 9)])
    with pytest.raises(ValueError, match="regions are of one image, not of a list of 2"):
        await client.classify([FILE, FILE], regions=QUARTERS)
    with pytest.raises(ValueError, match="regions are of the picture as it is: leave shrink out"):
        await client.classify(FILE, regions=QUARTERS, shrink=True)


async def test_a_decoder_elsewhere_decodes_regions_too(tiny_set):
    decoder = Decoder(Settings(model_set=str(tiny_set)))

    class Stage:
        async def decode_many(self, message: bytes) -> bytes:
            return await decode_many(decoder, message)

    remote = RemoteDecoder(handle_of(Stage()), SIZE * SIZE * 3)
    sent = regions_of([*QUARTERS, [0, 0, 61, 1]])
    decoded = await remote.decode([FILE], 9, "bulk", sent)
    here = await decoder.decode([FILE], regions=sent)
    np.testing.assert_array_equal(decoded.images, here.images)
    assert {place: fault.code for place, fault in decoded.faults.items()} == {4: "outside_picture"}
    assert decoded.faults == here.faults
    assert len(decoded.decode_ms) == len(decoded.images) == 4


async def test_many_regions_of_a_small_picture_take_their_turn_as_a_large_picture_does(tiny_set):
    decoder = Decoder(Settings(model_set=str(tiny_set)))
    side = 200
    data = cv2.imencode(".png", np.zeros((side, side, 3), np.uint8))[1].tobytes()
    few = regions_of([[0, 0, 1, 1]] * 2)
    many = regions_of([[0, 0, 1, 1]] * (HEAVY_PIXELS // side**2 + 1))
    assert len(many) <= 64
    assert type(decoder._begin(data, takes_heavy=True, regions=few)).__name__ == "_Outcome"
    heavy = decoder._begin(data, takes_heavy=True, regions=many)
    assert (type(heavy).__name__, heavy.pixels) == ("Heavy", side**2)
    assert len((await decoder.decode([data], regions=many)).images) == len(many)
