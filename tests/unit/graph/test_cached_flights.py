"""Identical images under way behind the response cache: computed once, whatever becomes of it."""

import asyncio

import pytest

from app.errors import NotReadyError, OverloadedError
from tests.support.cached_service import ONE, TWO, Cached, without_timings


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


async def test_those_that_wait_for_a_degraded_answer_compute_all_at_once(tiny_set):
    cached = Cached(tiny_set, answer_policy="any", member_patience_s=0.0)
    gate = cached.hold()
    cached.members["unsure"].raises = NotReadyError("gone")
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
    by_file = {file: set() for form in forms for file in form}
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
