"""The response cache of a real service.

In the fast tier, over gRPC too: tests/unit/http/test_response_cache.py, on tiny networks.
"""

import httpx
import pytest

from tests.support.redis_server import running_redis
from tests.support.services.processes import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.mark.redis
def test_with_redis_that_goes_away(start_service, redis, photo_label, photo):
    service = start_service(args={"cache": redis.url})
    assert service.label(photo) == photo_label

    def is_written() -> bool:  # by a task of its own
        return redis.command("DBSIZE") != b":0\r\n" or not service.label(photo + b"again")

    wait_until(is_written, 60, "an answer in Redis")
    redis.stop()
    for more in (*(bytes([number]) for number in range(5)), b""):
        assert service.label(photo + more) == photo_label
    service.stop()


def test_a_photo_that_was_seen_before(start_service, photo_label, photo):
    with httpx.Client(base_url=start_service(args={"cache": "local"}).url, timeout=60) as client:
        first, second = [client.post("/v1/classify", content=photo).json() for _ in range(2)]
        no_store = {"Cache-Control": "no-store"}
        fresh = client.post("/v1/classify", content=photo, headers=no_store).json()
    assert [answer.get("cached") for answer in (first, second, fresh)] == [None, True, None]
    for answer in (first, second, fresh):
        assert answer["predictions"][0]["label"] == photo_label
        for ours, theirs in zip(answer["predictions"], first["predictions"], strict=True):
            assert ours["probability"] == pytest.approx(theirs["probability"], abs=1e-6)
