"""Identical images under way behind the response cache: computed once, whatever becomes of it."""

import asyncio
from typing import Any

import pytest

from app.errors import NotReadyError, OverloadedError
from app.metrics.table import CACHE_LOOKUPS, STAGE_MS
from app.responses import Classified
from tests.support.cached_service import ONE, TWO, Cached, without_timings
from tests.support.fakes import NOT_AN_IMAGE
from tests.support.instruments import Instruments


async def test_identical_images_under_way_are_computed_once(cached):
    gate = cached.hold()
    requests = [asyncio.create_task(cached.classify(ONE)) for _ in range(5)]
    await cached.until_asked()
    gate.set()
    answers = [answer for (answer,) in await asyncio.gather(*requests)]
    assert cached.num_computed == 1
    assert [answer.cached for answer in answers] == [None, True, True, True, True]
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


async def test_those_that_wait_beside_a_cascade_share_its_answer(tiny_set, told: Instruments):
    answers = await shared(Cached(tiny_set, cascade_margin=0.5), ONE)
    assert [answer.cached for answer in answers] == [None, True, True]
    assert [answer.skipped_members for answer in answers] == [["unsure"]] * 3
    assert len({repr(without_timings(answer)) for answer in answers}) == 1
    assert told.of(CACHE_LOOKUPS) == {("miss",): 1, ("shared",): 2}


@pytest.mark.parametrize("combine", [None, "tests.support.own_functions:vote"])
async def test_those_that_wait_in_an_outage_share_what_nobody_keeps(
    tiny_set, told: Instruments, combine
):
    cached = Cached(tiny_set, answer_policy="any", member_patience_s=0.0, combine=combine)
    cached.members["unsure"].raises = NotReadyError("gone")
    answers = await shared(cached, ONE)
    assert [answer.cached for answer in answers] == [None, True, True]
    assert [answer.missing_members for answer in answers] == [{"unsure": "not_ready"}] * 3
    assert len({repr(without_timings(answer)) for answer in answers}) == 1
    assert cached.num_computed == 1
    (later,) = await cached.classify(ONE)
    assert later.cached is None
    assert told.of(CACHE_LOOKUPS) == {("miss",): 2, ("shared",): 2}


async def test_those_that_wait_for_a_file_that_is_no_image_share_its_fault(cached):
    cached.decoder.gate = asyncio.Event()
    requests = [asyncio.create_task(cached.classify(b"bad")) for _ in range(3)]
    while not cached.decoder.num_files:
        await asyncio.sleep(0)
    cached.decoder.gate.set()
    answers = await asyncio.gather(*requests)
    assert answers == [[NOT_AN_IMAGE]] * 3
    assert cached.decoder.num_files == 1


async def test_a_file_counts_once_among_the_lookups_however_often_it_is_looked_for(
    cached, told: Instruments
):
    gate = cached.hold()
    requests = [asyncio.create_task(cached.classify(ONE)) for _ in range(3)]
    await cached.until_asked()
    cached.members["sure"].raises = OverloadedError("full")
    gate.set()
    await asyncio.gather(*requests, return_exceptions=True)
    assert told.of(CACHE_LOOKUPS) == {("miss",): 3}
    times = {stage: n for (stage, _), n in told.observed(STAGE_MS).items()}
    assert "cache" not in times  # none of them had an answer
    cached.members["sure"].raises = None
    await cached.classify(ONE)
    assert told.of(CACHE_LOOKUPS) == {("miss",): 4}


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
