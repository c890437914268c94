"""The response cache of a real service, over HTTP and gRPC.

In the fast tier: tests/unit/http/test_response_cache.py, with the real stages on tiny networks.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from tests.support.redis_server import RedisServer, running_redis
from tests.support.services.live_service import Service, Start, changed_config, drawn_photo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grpc_port(free_port: Callable[[], int]) -> int:
    return free_port()


@pytest.fixture(scope="module")
def cached(
    start_service: Start, tmp_path_factory: pytest.TempPathFactory, grpc_port: int
) -> Service:
    folder = tmp_path_factory.mktemp("cached")
    with changed_config(folder) as content:
        content["applications"][0]["args"]["cache"] = "local"
    config = folder / "serve_config.yaml"
    service = start_service("--config", str(config), "--grpc-port", str(grpc_port))
    service.wait_ready()
    return service


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.mark.redis
def test_with_redis_that_goes_away(
    start_service: Start, tmp_path: Path, redis: RedisServer, photo_label: str, photo: bytes
) -> None:
    with changed_config(tmp_path) as content:
        content["applications"][0]["args"]["cache"] = redis.url
    service = start_service("--config", str(tmp_path / "serve_config.yaml"))
    service.wait_ready()
    with httpx.Client(base_url=service.url, timeout=60) as client:

        def label(data: bytes) -> str:
            answer = client.post("/v1/classify", content=data)
            assert answer.status_code == 200
            return answer.json()["predictions"][0]["label"]

        assert label(photo) == photo_label
        deadline = time.monotonic() + 60
        while redis.command("DBSIZE") == b":0\r\n":  # written by a task of its own
            assert time.monotonic() < deadline
            label(photo + b"again")
        redis.stop()
        for number in range(5):
            assert label(photo + bytes([number])) == photo_label
        assert label(photo) == photo_label
    service.stop()


def test_a_photo_that_was_seen_before(cached: Service, photo_label: str, photo: bytes) -> None:
    with httpx.Client(base_url=cached.url, timeout=60) as client:
        first, second = [client.post("/v1/classify", content=photo).json() for _ in range(2)]
        fresh = client.post(
            "/v1/classify", content=photo, headers={"Cache-Control": "no-store"}
        ).json()
    assert [answer.get("cached") for answer in (first, second, fresh)] == [None, True, None]
    for answer in (first, second, fresh):
        assert answer["predictions"][0]["label"] == photo_label
        for ours, theirs in zip(answer["predictions"], first["predictions"], strict=True):
            assert ours["probability"] == pytest.approx(theirs["probability"], abs=1e-6)


def test_over_grpc_too(cached: Service, grpc_port: int) -> None:
    request = ClassifyRequest(images=[drawn_photo(seed=9)])
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        ensemble = EnsembleStub(channel)

        def ask(*metadata: tuple[str, str]) -> bool:
            return (
                ensemble.Classify(request, metadata=metadata, timeout=60)
                .results[0]
                .classified.cached
            )

        assert [ask(), ask(), ask(("cache-control", "no-cache")), ask()] == [
            False,
            True,
            False,
            True,
        ]
