"""Two Gateways that share a real Redis: what one computed the other has, and no trouble is theirs.

The service is the real one, in this process, on fakes of the stages, without Ray Serve around it.
"""

import asyncio

import pytest

from app.answers import Classified
from app.graph import redis_cache
from app.graph.ensemble import CachedEnsemble
from app.graph.request import ClassifyRequest
from app.graph.service import EnsembleService
from app.settings import Settings
from app.stages.combiner import Combiner
from app.telemetry.metrics import RequestObserver
from tests.support.fakes import FakeDecoder, FakeMember, service_of
from tests.support.redis_server import running_redis
from tests.support.tiny_networks import LABELS, write_tiny_set

pytestmark = pytest.mark.redis
ROWS = {pixel: (pixel / 512, 0.5, 0.5 - pixel / 512) for pixel in range(256)}


def photo(number: int) -> bytes:
    """Return a file whose answer is its own: the fakes go by its length."""
    return b"good" + bytes(number)


def probabilities(number: int) -> dict[str, float]:
    """Return what a photo must be answered, by label."""
    return dict(zip(LABELS, ROWS[4 + number], strict=True))


def check(answer: Classified, number: int) -> None:
    found = {p.label: p.probability for p in answer.predictions}
    assert found == pytest.approx(probabilities(number), abs=1e-6)


@pytest.fixture
def redis(tmp_path):
    with running_redis(tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def patient(request, monkeypatch) -> None:
    """Give Redis more time than a busy machine makes it need, where it is not the subject."""
    if "frozen" not in request.node.name:
        monkeypatch.setattr(redis_cache, "READ_S", 60.0)
        monkeypatch.setattr(redis_cache, "WRITE_S", 60.0)


class Gateways:
    """Services of the same settings, each with a memory of its own."""

    def __init__(self, url, model_set):
        self._url, self._model_set = url, model_set
        self._services: list[EnsembleService] = []

    def another(self, model_set=None):
        settings = Settings(model_set=str(model_set or self._model_set), cache=self._url)
        members = {"sure": FakeMember(), "unsure": FakeMember()}
        for member in members.values():
            member.rows.update(ROWS)
        service = service_of(settings, FakeDecoder(), members, Combiner(settings))
        self._services.append(service)
        return service

    async def close(self) -> None:
        for service in self._services:
            await store_of(service)._client.aclose()


@pytest.fixture
async def gateways(redis, tiny_set):
    made = Gateways(redis.url, tiny_set)
    yield made
    redis.thaw()
    await made.close()


def store_of(service: EnsembleService):
    assert isinstance(service._graph, CachedEnsemble)
    return service._graph.cache._shared


async def classify(service: EnsembleService, *files: bytes) -> list[Classified]:
    request = ClassifyRequest(list(files), 3, 60.0, "id", RequestObserver())
    async with asyncio.timeout(60):
        answers = await service.classify(request)
        await store_of(service).written()
    classified = [answer for answer in answers if isinstance(answer, Classified)]
    assert len(classified) == len(files)
    return classified


async def was_cached(service: EnsembleService, *files: bytes) -> list[bool]:
    return [bool(answer.cached) for answer in await classify(service, *files)]


async def test_what_one_computed_another_has(gateways):
    one, other = gateways.another(), gateways.another()
    known, new = photo(1), photo(2)
    (computed,) = await classify(one, known)
    shared, fresh = await classify(other, known, new)
    assert (computed.cached, shared.cached, fresh.cached) == (None, True, None)
    assert (shared.predictions, shared.members) == (computed.predictions, computed.members)
    assert await was_cached(one, new) == [True]


async def test_another_model_set_sees_none_of_it(gateways, tmp_path):
    await classify(gateways.another(), photo(1))
    changed = write_tiny_set(tmp_path / "new", gains={"sure": 6.0, "unsure": 2.0})
    assert await was_cached(gateways.another(changed), photo(1)) == [False]
    assert await was_cached(gateways.another(), photo(1)) == [True]


@pytest.mark.parametrize("how", ["cut", "other bytes", "another type", "another image's"])
async def test_a_damaged_value_is_computed_again(gateways, redis, how):
    service = gateways.another()
    await classify(service, photo(1), photo(2))
    keys = [service._graph.keys.key(photo(number)) for number in (1, 2)]
    name, other = map(store_of(service)._name, keys)
    commands: dict[str, list[tuple[str, ...]]] = {
        "cut": [("SET", name, "x" * 10)],
        "other bytes": [("SETRANGE", name, "50", "xyz")],
        "another type": [("DEL", name), ("LPUSH", name, "x")],
        "another image's": [("COPY", other, name, "REPLACE")],
    }
    for command in commands[how]:
        redis.command(*command)
    assert await was_cached(gateways.another(), photo(1)) == [False]


async def test_frozen_no_request_fails_or_waits_for_it(gateways, redis):
    service = gateways.another()
    check((await classify(service, photo(3)))[0], 3)
    redis.freeze()
    await check_all_are_computed(service)
    assert (await ask(service, photo(3))).cached  # of this one's own memory
    assert store_of(service)._reads.is_open


async def test_gone_and_back(gateways, redis):
    service = gateways.another()
    check((await classify(service, photo(3)))[0], 3)
    redis.stop()
    await check_all_are_computed(service)
    redis.start()
    for breaker in (store_of(service)._reads, store_of(service)._writes):
        breaker._next_trial = 0.0  # as if the time had passed
    assert await was_cached(service, photo(41)) == [False]
    assert await was_cached(gateways.another(), photo(41)) == [True]


async def check_all_are_computed(service: EnsembleService) -> None:
    for number in range(30, 34):
        answer = await ask(service, photo(number))
        assert answer.cached is None
        check(answer, number)


async def ask(service: EnsembleService, file: bytes) -> Classified:
    """Classify one file, and do not wait for what is written."""
    async with asyncio.timeout(60):
        request = ClassifyRequest([file], 3, 60.0, "id", RequestObserver())
        (answer,) = await service.classify(request)
    assert isinstance(answer, Classified)
    return answer


async def test_full_it_answers_all_the_same(gateways, redis):
    redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    redis.command("CONFIG", "SET", "maxmemory", "1")
    service = gateways.another()
    assert await was_cached(service, photo(1)) == [False]
    assert await was_cached(service, photo(1)) == [True]  # from this one's memory
    assert await was_cached(gateways.another(), photo(1)) == [False]


async def test_requests_that_are_cancelled_mix_up_no_answers(gateways, redis):
    """A connection with half an answer in it must not be used for another request."""
    one = gateways.another()
    numbers = range(20, 60)
    await classify(one, *map(photo, numbers))
    for turn in range(12):
        other = gateways.another()
        tasks = {n: asyncio.create_task(ask(other, photo(n))) for n in numbers}
        for _ in range(turn):
            await asyncio.sleep(0)
        for number in numbers[::2]:
            tasks[number].cancel()
        for number, task in tasks.items():
            (found,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(found, asyncio.CancelledError):
                assert isinstance(found, Classified)
                check(found, number)
