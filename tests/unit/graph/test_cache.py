"""The ensemble behind the response cache: the same answers, computed once; also with Redis."""

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.answers import Classified, Fault, MemberAnswer, as_json
from app.errors import NotReadyError, OverloadedError
from app.graph.ensemble import CachedEnsemble
from app.graph.redis_cache import RedisStore, RowsFormat
from app.graph.request import CacheUse, ClassifyRequest, ResponseCache
from app.setting_values import RedisAddress
from app.settings import Settings
from app.stages.combiner import Combiner
from app.telemetry import metric_table as table
from app.telemetry.metrics import RequestObserver, record_redis
from tests.support.cached_service import ONE, TWO, Cached, without_timings
from tests.support.fake_redis import FakeRedis
from tests.support.fakes import NOT_AN_IMAGE, FakeDecoder, FakeMember, arrived, service_of
from tests.support.hand_clock import HandClock
from tests.support.plans import planned
from tests.support.tiny_networks import LABELS, write_tiny_set

ADDRESS = "redis://cache:6379/0"


@pytest.mark.parametrize("as_handles", [False, True], ids=["local objects", "handles"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
async def test_a_hit_is_what_would_have_been_computed(tiny_set, top_k, as_handles):
    cached = Cached(tiny_set, as_handles=as_handles)
    plain = Cached(tiny_set, cache="none")
    for file in (ONE, TWO):
        (first,) = await cached.classify(file)
        (hit,) = await cached.classify(file, top_k=top_k)
        (computed,) = await plain.classify(file, top_k=top_k)
        assert (first.cached, hit.cached, computed.cached) == (None, True, None)
        assert without_timings(hit) == without_timings(computed)  # to the last bit
    assert cached.num_computed == 2


async def test_without_a_cache_answers_have_no_word_of_it(tiny_set):
    plain = Cached(tiny_set, cache="none")
    for _ in range(2):
        (answer,) = await plain.classify(ONE)
        assert b"cache" not in as_json(answer)
    assert plain.num_computed == 2


async def test_the_timings_of_a_hit_are_its_own_requests(cached):
    await cached.classify(ONE)
    clock = HandClock()
    observer = arrived(clock.monotonic, read_s=0.25)
    clock.now += 0.25
    (hit,) = await cached.service.classify(ClassifyRequest([ONE], 1, 10.0, "own", observer))
    assert (hit.request_id, hit.timings_ms.total) == ("own", 250.0)
    stages = [(s.stage, s.start_ms, s.duration_ms) for s in hit.timings_ms.stages]
    assert stages == [("read", 0.0, 250.0), ("cache", 250.0, 0.0)]


async def test_a_miss_tells_of_the_lookup_too(cached):
    (miss,) = await cached.classify(ONE)
    stages = [stage.stage for stage in miss.timings_ms.stages]
    assert stages == ["read", "cache", "decode", "queue", "infer", "queue", "infer", "combine"]


async def test_each_file_of_a_form_by_itself(cached):
    await cached.classify(ONE)
    two, bad, one, again, new, last = await cached.classify(TWO, b"bad", ONE, TWO, b"good!", ONE)
    assert isinstance(bad, Fault)
    assert [a.cached for a in (two, one, again, new, last)] == [None, True, True, None, True]
    assert cached.members["sure"].seen == [[4], [8, 5]]  # the form's own in one call
    assert without_timings(two) == without_timings(again)
    assert two.predictions != new.predictions != one.predictions


async def test_faults_are_not_kept(cached):
    for _ in range(2):
        (fault,) = await cached.classify(b"bad")
        assert isinstance(fault, Fault)
    (fault, same) = await cached.classify(b"bad", b"bad")
    assert fault == same
    assert cached.decoder.num_files == 3  # one of a form's two


async def test_each_plan_has_answers_of_its_own(with_plan):
    cached = Cached(with_plan)
    (full,), (fast,) = [await cached.classify(ONE, plan=plan) for plan in ("full", "fast")]
    assert [full.cached, fast.cached] == [None, None]
    for computed in (full, fast):
        (hit,) = await cached.classify(ONE, plan=computed.plan)
        assert hit.cached
        assert without_timings(hit) == without_timings(computed)
    assert (full.asked, fast.asked) == (None, ["sure"])


async def test_answers_of_a_plan_are_kept_whether_it_skipped_members_or_not(with_plan):
    cached = Cached(with_plan, plan="fast")
    answers = {file: (await cached.classify(file))[0] for file in (ONE, TWO)}
    skipped = [answers[file].skipped_members for file in (ONE, TWO)]
    assert skipped == [["unsure"], None]  # of the first image the first member is sure
    for file, computed in answers.items():
        (hit,) = await cached.classify(file)
        assert (computed.cached, hit.cached) == (None, True)
        assert without_timings(computed) == without_timings(hit)
    assert cached.num_computed == 2


async def test_a_client_that_wants_a_new_answer(cached):
    await cached.classify(ONE)
    for member in cached.members.values():
        member.rows[4] = np.array((0.0, 0.0, 1.0), np.float32)
    (renewed,) = await cached.classify(ONE, cache_use="renew")
    assert (renewed.cached, renewed.predictions[0].probability) == (None, 1.0)
    (hit,) = await cached.classify(ONE)
    assert (hit.cached, hit.predictions[0].probability) == (True, 1.0)


async def test_a_client_that_wants_nothing_kept(cached):
    for _ in range(2):
        (answer,) = await cached.classify(ONE, cache_use="off")
        assert answer.cached is None
        assert "cache" not in [stage.stage for stage in answer.timings_ms.stages]
    (answer,) = await cached.classify(ONE)
    assert answer.cached is None
    assert cached.num_computed == 3


async def test_a_probe_asks_the_members_every_time(cached):
    for _ in range(2):
        await cached.classify(ONE, is_probe=True)
    assert cached.num_computed == 2


async def test_a_hit_is_no_sign_that_members_answer(cached):
    await cached.classify(ONE)
    cached.service._readiness._ready_until = 0.0
    await cached.classify(ONE)
    cached.members["sure"].raises = NotReadyError("gone")
    with pytest.raises(NotReadyError):
        await cached.service.check_ready()


async def test_what_another_gateway_hands_on_is_looked_up_too(cached):
    await cached.classify(ONE)
    request = ClassifyRequest([ONE], 2, 10.0, "id", RequestObserver())
    uses: dict[CacheUse, bool | None] = {"use": True, "renew": None, "off": None}
    for use, expected in uses.items():
        forwarded = pickle.loads(pickle.dumps(request._replace(cache_use=use).forwarded()))
        assert forwarded.observer is not request.observer  # each process has a clock of its own
        (answer,) = await cached.service.handle_forwarded(forwarded)
        assert answer.cached is expected


async def test_a_small_cache_never_answers_wrongly(tiny_set, told, monkeypatch):
    monkeypatch.setattr("app.graph.ensemble.MIB", 8 * 2**10)  # what cache_mib counts in
    cached, plain = Cached(tiny_set, cache_mib=1), Cached(tiny_set, cache="none")
    files = [b"good" + b"x" * n for n in range(60)]
    expected = {file: (await plain.classify(file))[0].predictions for file in files}
    for turn in range(3):
        for file in files[:: turn + 1]:
            assert (await cached.classify(file))[0].predictions == expected[file]
    assert sum(told.of(table.CACHE_EVICTIONS).values()) > 0


async def test_metrics(cached, told):
    await cached.classify(ONE)
    await cached.classify(ONE, ONE, TWO, TWO)
    assert told.of(table.CACHE_LOOKUPS) == {("hit",): 2, ("miss",): 2, ("shared",): 1}
    assert sum(told.of(table.ANSWERS).values()) == 5
    times = {stage: n for (stage, _), n in told.observed(table.STAGE_MS).items()}
    assert (times["read"], times["cache"], times["decode"], times["combine"]) == (2, 2, 2, 2)
    (num_bytes,) = told.of(table.CACHE_BYTES).values()
    assert 0 < num_bytes < 2**20


async def test_identical_images_under_way_are_computed_once(cached):
    answers = await shared(cached, ONE)
    assert cached.num_computed == 1
    assert [answer.cached for answer in answers] == [None, True, True]
    assert len({repr(without_timings(answer)) for answer in answers}) == 1


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_when_the_first_ends_in_vain_the_next_takes_over(cached, how):
    gate = cached.hold()
    requests = [asyncio.create_task(cached.classify(ONE)) for _ in range(4)]
    await cached.until_asked()
    if how == "fails":
        cached.members["sure"].raises = OverloadedError("full")
        gate.set()
        with pytest.raises(OverloadedError):
            await requests[0]
        cached.members["sure"].raises = None
    else:
        requests[0].cancel()
        await asyncio.wait(requests[:1])
        await cached.until_asked(2)
        gate.set()
    answers = [answer for (answer,) in await asyncio.gather(*requests[1:])]
    assert [answer.cached for answer in answers] == [None, True, True]
    assert cached.num_computed == 2


async def test_a_waiter_that_goes_leaves_the_first_alone(cached):
    gate = cached.hold()
    first, second = (asyncio.create_task(cached.classify(ONE)) for _ in range(2))
    await cached.until_asked()
    second.cancel()
    await asyncio.wait([second])
    gate.set()
    assert (await first)[0].cached is None


async def shared(cached: Cached, file: bytes) -> list[Classified]:
    """Return the answers of three requests for one image, of which one computes."""
    gate = cached.hold()
    requests = [asyncio.create_task(cached.classify(file)) for _ in range(3)]
    while not cached.members["sure"].asked:
        await asyncio.sleep(0)
    gate.set()
    return [answer for (answer,) in await asyncio.gather(*requests)]


async def test_those_that_wait_beside_a_plan_share_its_answer(with_plan, told):
    answers = await shared(Cached(with_plan, plan="fast"), ONE)
    assert [answer.cached for answer in answers] == [None, True, True]
    assert [answer.skipped_members for answer in answers] == [["unsure"]] * 3
    assert len({repr(without_timings(answer)) for answer in answers}) == 1
    assert told.of(table.CACHE_LOOKUPS) == {("miss",): 1, ("shared",): 2}


@pytest.mark.parametrize("combine", [None, "tests.support.own_functions:vote"])
async def test_those_that_wait_in_an_outage_share_what_nobody_keeps(tiny_set, told, combine):
    cached = Cached(tiny_set, answer_policy="any", member_patience_s=0.0, combine=combine)
    cached.members["unsure"].raises = NotReadyError("gone")
    answers = await shared(cached, ONE)
    assert [answer.cached for answer in answers] == [None, True, True]
    assert [answer.missing_members for answer in answers] == [{"unsure": "not_ready"}] * 3
    assert len({repr(without_timings(answer)) for answer in answers}) == 1
    assert cached.num_computed == 1
    (later,) = await cached.classify(ONE)
    assert later.cached is None
    assert told.of(table.CACHE_LOOKUPS) == {("miss",): 2, ("shared",): 2}


async def test_those_that_wait_for_a_file_that_is_no_image_share_its_fault(cached):
    cached.decoder.gate = asyncio.Event()
    requests = [asyncio.create_task(cached.classify(b"bad")) for _ in range(3)]
    while not cached.decoder.num_files:
        await asyncio.sleep(0)
    cached.decoder.gate.set()
    answers = await asyncio.gather(*requests)
    assert (answers, cached.decoder.num_files) == ([[NOT_AN_IMAGE]] * 3, 1)


async def test_a_file_counts_once_among_the_lookups_however_often_it_is_looked_for(cached, told):
    gate = cached.hold()
    requests = [asyncio.create_task(cached.classify(ONE)) for _ in range(3)]
    await cached.until_asked()
    cached.members["sure"].raises = OverloadedError("full")
    gate.set()
    await asyncio.gather(*requests, return_exceptions=True)
    assert told.of(table.CACHE_LOOKUPS) == {("miss",): 3}
    times = {stage: n for (stage, _), n in told.observed(table.STAGE_MS).items()}
    assert "cache" not in times  # none of them had an answer
    cached.members["sure"].raises = None
    await cached.classify(ONE)
    assert told.of(table.CACHE_LOOKUPS) == {("miss",): 4}


async def test_those_that_wait_for_one_that_left_members_no_time_compute_all_at_once(tiny_set):
    cached = Cached(tiny_set, answer_policy="any", member_patience_s=0.0)
    gate = cached.hold()
    cached.members["unsure"].raises = OverloadedError("full")
    requests = [asyncio.create_task(cached.classify(ONE)) for _ in range(3)]
    await cached.until_asked()
    second_gate = cached.hold()
    gate.set()
    async with asyncio.timeout(10):
        while len(cached.members["sure"].asked) < 3:  # the others, none of which may end yet
            await asyncio.sleep(0)
    second_gate.set()
    answers = [answer for (answer,) in await asyncio.gather(*requests)]
    assert [answer.degraded for answer in answers] == [True] * 3
    assert [answer.cached for answer in answers] == [None] * 3


async def test_forms_that_wait_for_each_other(cached):
    gate = cached.hold()
    forms = [(ONE, TWO), (TWO, ONE), (b"good!", TWO, ONE)]
    requests = [asyncio.create_task(cached.classify(*form)) for form in forms]
    await cached.until_asked(2)
    gate.set()
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*requests)
    assert cached.num_computed == 3
    by_file: dict[bytes, set[Any]] = {file: set() for form in forms for file in form}
    for form, row in zip(forms, answers, strict=True):
        for file, answer in zip(form, row, strict=True):
            by_file[file].add(repr(answer.predictions))
    assert all(len(found) == 1 for found in by_file.values())


async def test_a_form_does_not_keep_a_single_photo_waiting(cached):
    gate = cached.hold()
    form = asyncio.create_task(cached.classify(ONE, lane="bulk"))
    await cached.until_asked(1)
    single = asyncio.create_task(cached.classify(ONE))
    await cached.until_asked(2)
    gate.set()
    assert [(await task)[0].cached for task in (form, single)] == [None, None]


BOUNDED = settings(
    max_examples=150,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FILES = {name: b"good" + bytes(name) for name in range(4)} | {9: b"bad"}
ROWS = {4 + name: (0.5 - name / 8, name / 8, 0.5) for name in range(4)}
ROWS[4 + 2] = (0.2, 0.2, 0.6)
ASKED = st.fixed_dictionaries(
    {
        "files": st.lists(st.sampled_from(sorted(FILES)), min_size=1, max_size=4),
        "lane": st.sampled_from(["interactive", "bulk"]),
        "cache_use": st.sampled_from(["use", "use", "use", "renew", "off"]),
        "starts_after": st.integers(0, 3),  # turns of the loop
        "leaves_after": st.one_of(st.none(), st.integers(0, 12)),
    }
)


class Unsteady(FakeMember):
    """A member whose calls take some turns of the loop, and of which some fail."""

    def __init__(self, fails: set[int], turns: int) -> None:
        super().__init__()
        self.rows = {pixel: np.array(row, np.float32) for pixel, row in ROWS.items()}
        self._fails, self._turns = fails, turns

    async def classify(
        self, images, left_s, lane="interactive", *, has_features=False
    ) -> MemberAnswer:
        number = len(self.asked)
        answer = await super().classify(images, left_s, lane)
        for _ in range(self._turns):
            await asyncio.sleep(0)
        if number in self._fails:
            raise OverloadedError("no place")
        return answer


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    folder = write_tiny_set(tmp_path_factory.mktemp("sets") / "tiny")
    return planned(folder, (("sure",), 0.55), (("unsure",), None))


@BOUNDED
@given(
    asked=st.lists(ASKED, min_size=1, max_size=8),
    fails=st.sets(st.integers(0, 6), max_size=4),
    turns=st.integers(0, 3),
    policy=st.sampled_from(["all", "any"]),
    plan=st.sampled_from(["full", "fast"]),  # of the third file the first member is sure
)
def test_requests_beside_each_other(beside, asked, fails, turns, policy, plan):
    async def play() -> None:
        options = Settings(
            model_set=str(beside),
            cache="local",
            answer_policy=policy,
            member_patience_s=0.0,
            plan=plan,
        )
        members = {"sure": Unsteady(fails, turns), "unsure": Unsteady(set(), turns)}
        service = service_of(options, FakeDecoder(), members, Combiner(options))

        async def one(of: dict) -> None:
            for _ in range(of["starts_after"]):
                await asyncio.sleep(0)
            files = [FILES[name] for name in of["files"]]
            request = ClassifyRequest(
                files, 3, 60.0, "id", RequestObserver(), of["lane"], plan, cache_use=of["cache_use"]
            )
            for name, answer in zip(of["files"], await service.classify(request), strict=True):
                check(answer, name)
                assert of["cache_use"] == "use" or isinstance(answer, Fault) or not answer.cached

        async def perhaps_leaving(of: dict) -> None:
            task = asyncio.ensure_future(one(of))
            if of["leaves_after"] is not None:
                for _ in range(of["leaves_after"]):
                    await asyncio.sleep(0)
                task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            if ended is not None:
                assert isinstance(ended, OverloadedError | asyncio.CancelledError), repr(ended)
                assert of["leaves_after"] is not None or isinstance(ended, OverloadedError)

        async with asyncio.timeout(30):
            await asyncio.gather(*map(perhaps_leaving, asked))
        graph = service._graph
        assert isinstance(graph, CachedEnsemble)
        assert len(graph.cache._flights) == 0
        kept = {name: graph.cache.read(graph.keys.key(data, plan)) for name, data in FILES.items()}
        num_rows = {name: len(rows) for name, rows in kept.items() if rows is not None}
        assert num_rows == {name: 1 if plan == "fast" and name == 2 else 2 for name in num_rows}

    asyncio.run(play())


def check(answer: Any, name: int) -> None:
    if name == 9:
        assert isinstance(answer, Fault)
        return
    assert not isinstance(answer, Fault)
    found = {p.label: p.probability for p in answer.predictions}
    assert found == dict(zip(LABELS, np.array(ROWS[4 + name], np.float32).tolist(), strict=True))
    absent = {*(answer.skipped_members or ()), *(answer.missing_members or ())}
    assert {*answer.members} == {"sure", "unsure"} - absent
    assert answer.degraded == bool(answer.missing_members)


class Gateway:
    """One of those that share ``redis``."""

    def __init__(self, tiny_set, redis, monkeypatch, **options):
        monkeypatch.setattr("app.graph.redis_cache.client_of", lambda _: redis)
        settings = Settings(model_set=str(tiny_set), cache=ADDRESS, **options)
        self.members = {"sure": FakeMember(), "unsure": FakeMember((0.5, 0.3, 0.2))}
        self.service = service_of(settings, FakeDecoder(), self.members, Combiner(settings))
        graph = self.service._graph
        assert isinstance(graph, CachedEnsemble)
        self.cache = graph.cache
        self.store = self.cache._shared
        assert isinstance(self.store, RedisStore)

    async def cached(self, *files: bytes, **options: Any) -> list[bool]:
        options = {"plan": self.service.settings.plan} | options
        request = ClassifyRequest(list(files), 3, 10.0, "id", RequestObserver(), **options)
        answers = await self.service.classify(request)
        await self.store.written()
        assert all(answer.predictions[0].probability > 0.4 for answer in answers)
        return [bool(answer.cached) for answer in answers]

    @property
    def num_computed(self) -> int:
        return sum(map(len, self.members["sure"].seen))


@pytest.fixture(scope="module")
def with_plan(tmp_path_factory):
    folder = write_tiny_set(tmp_path_factory.mktemp("sets") / "tiny")
    return planned(folder, (("sure",), 0.7), (("unsure",), None))


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis()


@pytest.fixture
def gateways(tiny_set, redis, monkeypatch) -> list[Gateway]:
    return [Gateway(tiny_set, redis, monkeypatch) for _ in range(3)]


async def test_each_file_of_a_form_is_looked_for_and_all_in_one_call(gateways, redis, told):
    one, other, _ = gateways
    await one.cached(ONE)
    assert await other.cached(TWO, ONE, TWO) == [False, True, True]
    assert redis.num_reads == 2
    assert told.of(table.CACHE_LOOKUPS) == {("miss",): 2, ("hit",): 1, ("shared",): 1}
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
async def test_redis_in_trouble_is_no_requests_trouble(gateways, redis, error, told):
    redis.raises = error
    one, other, _ = gateways
    assert await one.cached(ONE, TWO) == [False, False]
    assert await one.cached(ONE, TWO) == [True, True]
    assert await other.cached(ONE) == [False]
    assert {result for (result,) in told.of(table.CACHE_REDIS)} == {"failed", "unwritten"}


async def test_what_a_plan_was_sure_of_is_shared(with_plan, redis, monkeypatch):
    one, other = (Gateway(with_plan, redis, monkeypatch, plan="fast") for _ in range(2))
    one.members["sure"].rows = other.members["sure"].rows = {len(TWO): (0.5, 0.4, 0.1)}
    assert await one.cached(ONE, TWO) == [False, False]
    assert await other.cached(ONE, TWO) == [True, True]
    assert (one.members["unsure"].seen, other.num_computed) == ([[len(TWO)]], 0)


async def test_what_a_client_wants_anew_is_written_and_not_read_and_the_rest_not_kept(
    gateways, redis
):
    one, other, third = gateways
    assert await other.cached(ONE, cache_use="off") == [False]
    assert redis.values == {}
    assert await one.cached(ONE, cache_use="renew") == [False]
    assert await other.cached(ONE, cache_use="off") == [False]
    assert redis.num_reads == 0
    assert await third.cached(ONE) == [True]


async def test_names_there_tell_the_model_set(gateways, redis):
    await gateways[0].cached(ONE)
    (name,) = redis.values
    fingerprint = gateways[0].service._graph.keys.fingerprint
    assert name.startswith(f"tandem:1:{fingerprint}:")


def test_without_redis_there_is_no_store():
    assert asyncio.run(ResponseCache(1000).fetch({0: None})) == {}
    store = RedisStore(
        RedisAddress.of(ADDRESS), RowsFormat("", (1,), 1), "", record_redis, lambda _: FakeRedis()
    )
    asyncio.run(store.written())  # of nothing
