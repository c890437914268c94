"""A cache whose Redis is shared: what a request does with it, whatever becomes of it."""

import asyncio
from typing import Any

import pytest

from app.caching.redis_store import RedisStore
from app.caching.response_cache import ResponseCache
from app.caching.values import RowsFormat
from app.deployments.combiner import Combiner
from app.graph.cached import CachedEnsemble
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.metrics.requests import record_redis
from app.metrics.table import CACHE_LOOKUPS, CACHE_REDIS
from app.setting_values import RedisAddress
from app.settings import Settings
from tests.support.fake_redis import FakeRedis
from tests.support.fakes import FakeDecoder, FakeMember, service_of
from tests.support.instruments import Instruments

ADDRESS = "redis://cache:6379/0"
ONE, TWO = b"good", b"good two"


class Gateway:
    """One of those that share ``redis``."""

    def __init__(
        self, tiny_set, redis: FakeRedis, monkeypatch: pytest.MonkeyPatch, **options: object
    ) -> None:
        monkeypatch.setattr("app.caching.redis_store.client_of", lambda _: redis)
        settings = Settings(model_set=str(tiny_set), cache=ADDRESS, **options)
        self.members = {"sure": FakeMember(), "unsure": FakeMember((0.5, 0.3, 0.2))}
        self.service = service_of(settings, FakeDecoder(), self.members, Combiner(settings))
        graph = self.service._graph
        assert isinstance(graph, CachedEnsemble)
        self.cache = graph.cache
        self.store = self.cache._shared
        assert isinstance(self.store, RedisStore)

    async def cached(self, *files: bytes, **options: Any) -> list[bool]:
        request = ClassifyRequest(list(files), 3, 10.0, "id", RequestObserver(), **options)
        answers = await self.service.classify(request)
        await self.store.written()
        assert all(answer.predictions[0].probability > 0.4 for answer in answers)
        return [bool(answer.cached) for answer in answers]

    @property
    def num_computed(self) -> int:
        return sum(map(len, self.members["sure"].seen))


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis()


@pytest.fixture
def gateways(tiny_set, redis, monkeypatch) -> list[Gateway]:
    return [Gateway(tiny_set, redis, monkeypatch) for _ in range(3)]


async def test_each_file_of_a_form_is_looked_for_and_all_in_one_call(
    gateways, redis, told: Instruments
):
    one, other, _ = gateways
    await one.cached(ONE)
    assert await other.cached(TWO, ONE, TWO) == [False, True, True]
    assert redis.num_reads == 2
    assert told.of(CACHE_LOOKUPS) == {("miss",): 2, ("hit",): 1, ("shared",): 1}
    assert other.num_computed == 1
    assert await other.cached(ONE, TWO) == [True, True]  # from its own memory now
    assert redis.num_reads == 2


async def test_identical_images_are_looked_for_once(gateways, redis):
    one, other, _ = gateways
    await one.cached(ONE)
    redis.gate = asyncio.Event()
    requests = [asyncio.create_task(other.cached(ONE)) for _ in range(5)]
    while redis.num_reads < 2:
        await asyncio.sleep(0)
    redis.gate.set()
    assert await asyncio.gather(*requests) == [[True]] * 5
    assert (redis.num_reads, other.num_computed) == (2, 0)


async def test_one_that_is_cancelled_while_it_looks_leaves_it_to_the_next(gateways, redis):
    one, other, _ = gateways
    await one.cached(ONE)
    redis.gate = asyncio.Event()
    first, second = (asyncio.create_task(other.cached(ONE)) for _ in range(2))
    while redis.num_reads < 2:
        await asyncio.sleep(0)
    first.cancel()
    redis.gate.set()
    assert await second == [True]
    assert len(other.cache._flights) == 0


@pytest.mark.parametrize("error", [ConnectionError("gone"), TimeoutError(), ValueError("odd")])
async def test_redis_in_trouble_is_no_requests_trouble(gateways, redis, error, told: Instruments):
    redis.raises = error
    one, other, _ = gateways
    assert await one.cached(ONE, TWO) == [False, False]
    assert await one.cached(ONE, TWO) == [True, True]
    assert await other.cached(ONE) == [False]
    results = {result for (result,) in told.of(CACHE_REDIS)}
    assert results == {"failed", "unwritten"}


async def test_what_a_cascade_was_sure_of_is_shared(tiny_set, redis, monkeypatch):
    one, other = (Gateway(tiny_set, redis, monkeypatch, cascade_margin=0.3) for _ in range(2))
    one.members["sure"].rows = other.members["sure"].rows = {len(TWO): (0.5, 0.4, 0.1)}
    assert await one.cached(ONE, TWO) == [False, False]
    assert await other.cached(ONE, TWO) == [True, True]
    assert one.members["unsure"].seen == [[len(TWO)]]
    assert other.num_computed == 0


async def test_what_a_client_wants_anew_is_written_and_not_read(gateways, redis):
    one, other, third = gateways
    assert await one.cached(ONE, cache_use="renew") == [False]
    assert redis.num_reads == 0
    assert await other.cached(ONE, cache_use="off") == [False]
    assert redis.num_reads == 0
    assert await third.cached(ONE) == [True]


async def test_what_a_client_wants_not_kept_is_not_written(gateways, redis):
    await gateways[0].cached(ONE, cache_use="off")
    assert redis.values == {}


async def test_names_there_tell_the_model_set(gateways, redis):
    await gateways[0].cached(ONE)
    (name,) = redis.values
    fingerprint = gateways[0].service._graph.keys.fingerprint
    assert name.startswith(f"tandem:1:{fingerprint}:")


async def test_a_poisoned_value_is_counted_and_computed_again(gateways, redis, told: Instruments):
    one, other, _ = gateways
    await one.cached(ONE)
    redis.values = dict.fromkeys(redis.values, b"\x80\x04K\x01.")  # a pickle
    assert await other.cached(ONE) == [False]
    assert told.of(CACHE_REDIS)[("bad",)] == 1


def test_without_redis_there_is_no_store():
    cache = ResponseCache(1000)
    assert asyncio.run(cache.fetch({0: None})) == {}
    store = RedisStore(
        RedisAddress.of(ADDRESS), RowsFormat("", (1,), 1), "", record_redis, lambda _: FakeRedis()
    )
    asyncio.run(store.written())  # of nothing
