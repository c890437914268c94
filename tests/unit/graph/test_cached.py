"""The ensemble behind the response cache: the same answers, computed once."""

import pickle

import numpy as np
import pytest

from app.caching.response_cache import CacheUse
from app.errors import NotReadyError, OverloadedError
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.messages import Fault
from app.metrics.table import ANSWERS, CACHE_BYTES, CACHE_EVICTIONS, CACHE_LOOKUPS, STAGE_MS
from app.responses import as_json
from tests.support.cached_service import ONE, TWO, Cached, without_timings
from tests.support.fakes import arrived
from tests.support.hand_clock import HandClock
from tests.support.instruments import Instruments


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
    assert hit.request_id == "own"
    assert hit.timings_ms.total == 250.0
    stages = [(s.stage, s.start_ms, s.duration_ms) for s in hit.timings_ms.stages]
    assert stages == [("read", 0.0, 250.0), ("cache", 250.0, 0.0)]


async def test_a_miss_tells_of_the_lookup_too(cached):
    (miss,) = await cached.classify(ONE)
    stages = [stage.stage for stage in miss.timings_ms.stages]
    assert stages == ["read", "cache", "decode", "queue", "infer", "queue", "infer", "combine"]


async def test_each_file_of_a_form_by_itself(cached):
    await cached.classify(ONE)
    answers = await cached.classify(TWO, b"bad", ONE, TWO, b"good!", ONE)
    two, bad, one, again, new, last = answers
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


async def test_errors_are_not_kept(cached):
    cached.members["sure"].raises = OverloadedError("full")
    with pytest.raises(OverloadedError):
        await cached.classify(ONE)
    cached.members["sure"].raises = None
    (answer,) = await cached.classify(ONE)
    assert answer.cached is None


async def test_degraded_answers_are_not_kept(tiny_set):
    cached = Cached(tiny_set, answer_policy="any", member_patience_s=0.0)
    cached.members["unsure"].raises = NotReadyError("gone")
    (degraded,) = await cached.classify(ONE)
    assert degraded.degraded
    cached.members["unsure"].raises = None
    answers = [(await cached.classify(ONE, lane="bulk"))[0] for _ in range(2)]
    assert all(answer.cached is None for answer in answers if answer.degraded)


async def test_answers_of_a_cascade_are_kept_whether_it_skipped_members_or_not(tiny_set):
    cached = Cached(tiny_set, cascade_margin=0.5)
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
        asked = request._replace(cache_use=use)
        forwarded = pickle.loads(pickle.dumps(asked.forwarded()))
        assert forwarded.observer is not request.observer  # each process has a clock of its own
        (answer,) = await cached.service.handle_forwarded(forwarded)
        assert answer.cached is expected


async def test_a_small_cache_never_answers_wrongly(tiny_set, told: Instruments, monkeypatch):
    monkeypatch.setattr("app.graph.cached.MIB", 8 * 2**10)  # what cache_mib counts in
    cached, plain = Cached(tiny_set, cache_mib=1), Cached(tiny_set, cache="none")
    files = [b"good" + b"x" * n for n in range(60)]
    expected = {file: (await plain.classify(file))[0].predictions for file in files}
    for turn in range(3):
        for file in files[:: turn + 1]:
            assert (await cached.classify(file))[0].predictions == expected[file]
    assert sum(told.of(CACHE_EVICTIONS).values()) > 0


async def test_metrics(cached, told: Instruments):
    await cached.classify(ONE)
    await cached.classify(ONE, ONE, TWO, TWO)
    assert told.of(CACHE_LOOKUPS) == {("hit",): 2, ("miss",): 2, ("shared",): 1}
    assert sum(told.of(ANSWERS).values()) == 5
    times = {stage: n for (stage, _), n in told.observed(STAGE_MS).items()}
    assert (times["read"], times["cache"], times["decode"], times["combine"]) == (2, 2, 2, 2)
    (num_bytes,) = told.of(CACHE_BYTES).values()
    assert 0 < num_bytes < 2**20
