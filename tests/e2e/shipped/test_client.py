"""tandem_client against the real service: every kind of image, many at a time, errors, gRPC."""

from typing import Any, Literal

import cv2
import numpy as np
import pytest

from tandem_client import AsyncClient, BadImage, BadRequest, Client, DeadlineExceeded
from tandem_client.grpc_client import GrpcClient
from tests.support.services.live_service import drawn_photo


@pytest.fixture(scope="module")
def tandem(service_url):
    with Client(service_url, timeout=60) as client:
        yield client


def test_the_answer_is_that_of_the_interface(tandem, client, photo):
    told = client.post("/v1/classify", content=photo).json()
    answer = tandem.classify(photo)
    assert [(p.index, p.label) for p in answer.predictions] == [
        (p["index"], p["label"]) for p in told["predictions"]
    ]
    assert answer.probability == pytest.approx(told["predictions"][0]["probability"], abs=1e-6)
    assert answer.members.keys() == told["members"].keys()
    assert answer.timings.total_ms > 0


def test_pixels_are_classified_as_their_file_is(tandem, photo):
    bgr: Any = cv2.imdecode(np.frombuffer(photo, np.uint8), cv2.IMREAD_COLOR)
    encoded = cv2.imencode(".png", bgr)[1].tobytes()
    wanted = [p.probability for p in tandem.classify(encoded, top_k=10).predictions]
    forms: list[tuple[Any, Literal["rgb", "bgr"]]] = [(bgr, "bgr"), (bgr[..., ::-1], "rgb")]
    for array, channels in forms:
        said = tandem.classify(array, channels=channels, top_k=10)
        assert [p.probability for p in said.predictions] == pytest.approx(wanted, abs=1e-6)


def test_several_in_one_request(tandem, photo, photo_label):
    first, second, third = tandem.classify([photo, b"no image", photo], top_k=1)
    assert (first.get().label, third.get().label) == (photo_label, photo_label)
    assert isinstance(second.error, BadImage)


async def test_many_files_sync_and_async_in_order(service_url, tandem, tmp_path):
    paths = [tmp_path / f"{n}.jpg" for n in range(40)]
    for n, path in enumerate(paths):
        path.write_bytes(drawn_photo(n % 4))
    paths[7].write_bytes(b"no image")
    blocking = list(tandem.classify_many(paths))
    async with AsyncClient(service_url, timeout=60) as client:
        on_loop = [r async for r in client.classify_many(paths, concurrency=8)]
    for results in (blocking, on_loop):
        assert [result.path for result in results] == paths
        assert [result.index for result in results if result.error] == [7]
        assert results[0].get().label == results[4].get().label


def test_the_services_words(tandem, photo):
    with pytest.raises(BadRequest, match="ask for 1 to") as caught:
        tandem.classify(photo, top_k=9999)
    assert caught.value.code == "bad_parameter"
    assert caught.value.request_id
    with pytest.raises(DeadlineExceeded):
        tandem.classify(photo, timeout=0.001)


def test_over_grpc_it_answers_as_over_http(service, grpc_port, photo):
    with Client(service.url) as client, GrpcClient(f"127.0.0.1:{grpc_port}") as over_grpc:
        wanted, said = client.classify(photo), over_grpc.classify(photo)
        first, second = over_grpc.classify([photo, b"no image"])
        with pytest.raises(BadRequest, match="ask for 1 to") as caught:
            over_grpc.classify(photo, top_k=9999)
    assert [p.label for p in said.predictions] == [p.label for p in wanted.predictions]
    assert said.probability == pytest.approx(wanted.probability, abs=1e-6)
    assert said.members.keys() == wanted.members.keys()
    assert first.get().label == said.label
    assert isinstance(second.error, BadImage)
    assert caught.value.code == "bad_parameter"
