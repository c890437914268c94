"""The batch queue on a network whose every run the test ends itself.

Then the larger batches for a backlog, images with a deadline, and what holds whatever happens.
"""

import asyncio
import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import DeadlineError, OverloadedError
from app.queueing.batch_queue import ALONE_S, BacklogSize, BatchQueue
from app.queueing.scheduler import BatchResult, ExecutedBatch, TimedRows
from app.setting_values import form_places
from tests.support.hand_clock import HandClock
from tests.support.queued_images import ImageFuture, NumberedCall, submit
from tests.support.steps import SteppedNetwork, begin, image, images, make_queue, number_of, settle

USUAL, LARGE, ENOUGH = 4, 8, 16


@pytest.fixture
def network() -> SteppedNetwork:
    return SteppedNetwork()


@pytest.fixture
def queue(network) -> BatchQueue:
    return make_queue(network)


async def test_a_lone_image_starts_at_once_and_alone(network, queue):
    (future,) = await begin(queue, 7)
    assert network.batches == [[7]]  # no timer: nothing but the loop's next turns
    network.now += 0.5
    network.finish()
    result = await future
    assert number_of(result) == 7
    assert (result.queued_s, result.batch.infer_s, result.batch.size) == (0.0, 0.5, 1)


async def test_while_a_batch_runs_the_next_one_grows(network, queue):
    futures = [(await begin(queue, number))[0] for number in range(7)]
    assert (network.batches, len(queue)) == ([[0]], 6)
    await network.finish_all()
    assert network.batches == [[0], [1, 2, 3, 4], [5, 6]]
    assert [number_of(await f) for f in futures] == list(range(7))
    assert [(await f).batch.size for f in futures] == [1, 4, 4, 4, 4, 2, 2]


async def test_the_worker_ends_when_idle_and_starts_again(network, queue):
    for number in (1, 2):
        before = asyncio.all_tasks()
        (future,) = submit(queue, [image(number)])
        await network.finish_all()
        assert number_of(await future) == number
        assert asyncio.all_tasks() == before


async def test_a_full_queue_takes_all_or_none(network):
    queue = make_queue(network, max_queued=3)
    futures = await begin(queue, 0) + submit(queue, images(1, 2))
    with pytest.raises(OverloadedError, match=r"2 images are queued, and 2 more .* limit of 3"):
        submit(queue, images(3, 4))
    assert len(queue) == 2
    futures += submit(queue, [image(3)])  # exactly the room there is
    await network.finish_all()
    assert [number_of(await f) for f in futures] == [0, 1, 2, 3]


async def test_an_image_that_makes_its_batch_fail_fails_alone(network, queue):
    network.bad = {2}
    futures = submit(queue, images(0, 1, 2, 3))
    await network.finish_all()
    answers: list[Any] = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(answers.pop(2), ValueError)
    sizes = [(number_of(answer), answer.batch.size) for answer in answers]
    assert sizes == [(0, 1), (1, 1), (3, 1)]


async def test_images_of_different_shapes_do_not_spoil_each_other(network, queue):
    futures = submit(queue, [image(1), np.zeros((5, 4, 3), np.uint8), image(2)])
    await network.finish_all()
    assert [number_of(await f) for f in futures] == [1, 0, 2]


async def test_a_wrong_number_of_rows_is_an_error_not_somebody_elses_answer():
    async def run(batch):
        return np.zeros((len(batch) + 1, 2), np.float32)

    futures = submit(BatchQueue(run, range(1, 5), 64), images(1, 2))
    answers = await asyncio.gather(*futures, return_exceptions=True)
    assert [str(a) for a in answers] == ["network returned 2 rows for 1 images"] * 2


async def test_a_caller_that_leaves_while_its_batch_fails_is_not_run_again(network, queue):
    network.bad = {1}
    gone, stays = await begin(queue, 0, 1)
    gone.cancel()
    await network.finish_all()
    assert isinstance(stays.exception(), ValueError)
    assert network.batches == [[0, 1], [1]]


async def test_ten_thousand_callers_that_all_leave(network):
    queue = make_queue(network, max_queued=10_001)
    (first,) = await begin(queue, 0)
    callers = [asyncio.ensure_future(waiting(queue, n)) for n in range(10_000)]
    await settle()
    assert len(queue) == 10_000
    for caller in callers:
        caller.cancel()
    (last,) = submit(queue, [image(1)])
    await network.finish_all()
    assert (number_of(await first), number_of(await last)) == (0, 1)
    assert len(network.batches) == 2  # none of the ten thousand was run
    assert len(queue) == 0
    assert all(caller.cancelled() for caller in callers)


async def waiting(queue: BatchQueue, number: int) -> BatchResult:
    (future,) = submit(queue, [image(number)])
    return await future


async def test_forms_leave_places_for_single_images(network):
    """Interactive images go first: it must not be forms alone that have places to wait in."""
    queue = make_queue(network, max_queued=8)
    others = await begin(queue, 0)
    others += submit(queue, images(1, 2, 3), lane="bulk")
    others += submit(queue, images(4, 5, 6))  # as its client asked to go first
    refusal = r"6 images are queued, and 2 more .* limit of 6 \(the rest"
    with pytest.raises(OverloadedError, match=refusal):
        submit(queue, images(7, 8), lane="bulk")
    singles = [submit(queue, [image(n)])[0] for n in (9, 10)]
    refusal = r"8 images are queued, and 1 more .* limit of 8; try"
    with pytest.raises(OverloadedError, match=refusal):
        submit(queue, [image(11)])
    singles[1].cancel()
    singles[1:] = submit(queue, [image(11)])  # in the last place, whose caller has gone
    await network.finish_all()
    assert [number_of(await future) for future in singles] == [9, 11]
    assert all(future.done() for future in others)


async def test_nothing_to_submit_is_no_error(network, queue):
    assert await begin(queue) == []
    assert network.batches == []


async def test_who_keeps_a_record_hears_of_every_batch(network):
    network.bad = {3}
    heard: list[ExecutedBatch] = []
    queue = BatchQueue(network.run, (1, 2), 64, network.clock, on_batch=heard.append)
    (first,) = await begin(queue, 0, call=7)
    others = submit(queue, [image(1)], call=8) + submit(queue, [image(2)])
    (bad,) = submit(queue, [image(3)], call=9)
    network.now += 2.0
    await network.finish_all()
    calls = [(batch.calls, batch.error is None) for batch in heard]
    numbers = [([c.number for c in of if isinstance(c, NumberedCall)], ok) for of, ok in calls]
    assert numbers == [([7], True), ([8, 0], True), ([9], False)]
    assert (heard[0].started, heard[0].ended) == (0.0, 2.0)
    batches = [(await future).batch for future in (first, *others)]
    assert [heard.index(batch) for batch in batches] == [0, 1, 1]
    assert [batch.started for batch in batches] == [0.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="3"):
        await bad


async def test_a_batch_that_waited_for_its_thread_ran_when_it_says():
    executed: list[ExecutedBatch] = []
    clock = HandClock(0.0)

    async def run(batch) -> TimedRows:
        clock.now = 9.0  # when the loop hears of it
        return TimedRows(np.zeros((len(batch), 2), np.float32), 3.0, 5.0)

    queue = BatchQueue(run, (1, 4), 64, clock, on_batch=executed.append)
    (future,) = submit(queue, [image(1)])
    assert (await future).queued_s == 3.0
    assert [(batch.started, batch.ended) for batch in executed] == [(3.0, 5.0)]
    assert queue.fastest_s == 2.0


class Backlogs:
    """A queue with larger batches for a backlog, which :meth:`prepare` compiles when it may."""

    def __init__(self, error: Exception | None = None) -> None:
        self.network, self.error = SteppedNetwork(), error
        self.num_prepared = 0
        self.may_end = asyncio.Event()
        backlog = BacklogSize("one", USUAL, 1, self.prepare)
        self.queue = BatchQueue(
            self.network.run, (1, USUAL), 4096, self.network.clock, backlog=backlog
        )

    async def prepare(self) -> None:
        self.num_prepared += 1
        await self.may_end.wait()
        if self.error:
            raise self.error

    async def sizes(self, num: int, num_bulk: int = 0) -> list[int]:
        """Submit so many images, run them all, and return the sizes of their batches."""
        first = len(self.network.batches)
        submit(self.queue, images(*range(num_bulk)), lane="bulk")
        futures = submit(self.queue, images(*range(num))) if num else []
        await self.network.finish_all()
        assert [number_of(await future) for future in futures] == list(range(num))
        return [len(batch) for batch in self.network.batches[first:]]

    async def prepared(self) -> None:
        self.may_end.set()
        assert set(await self.sizes(ENOUGH)) == {USUAL}
        await settle()
        assert self.num_prepared == 1


@pytest.fixture
def backlogs() -> Backlogs:
    return Backlogs()


async def test_without_a_backlog_nothing_is_prepared(backlogs):
    for _ in range(3):
        assert await backlogs.sizes(ENOUGH - 1) == [4, 4, 4, 1, 1, 1]
    assert backlogs.num_prepared == 0


async def test_the_usual_size_goes_on_while_it_is_prepared(backlogs):
    for _ in range(3):
        assert await backlogs.sizes(2 * ENOUGH) == [USUAL] * 8
    assert backlogs.num_prepared == 1


async def test_when_it_is_prepared_a_backlog_has_it(backlogs):
    await backlogs.prepared()
    assert await backlogs.sizes(2 * ENOUGH) == [8, 8, 8, 4, 4]
    assert await backlogs.sizes(ENOUGH - 1) == [4, 4, 4, 1, 1, 1]
    assert backlogs.num_prepared == 1
    backlogs.queue.max_batch_size = 1  # a smaller limit is kept
    assert set(await backlogs.sizes(2 * ENOUGH)) == {1}


async def test_every_place_must_find_a_batch(backlogs):
    backlog = BacklogSize("one", USUAL, 6, backlogs.prepare)
    backlog.waited(6 * LARGE - 1)
    await settle()
    assert backlogs.num_prepared == 0
    backlog.waited(6 * LARGE)
    backlogs.may_end.set()
    await settle()
    assert backlog.is_due(6 * LARGE)
    assert not backlog.is_due(6 * LARGE - 1)


@pytest.mark.parametrize("error", [MemoryError("none is left"), RuntimeError("OpenVINO")])
async def test_one_that_cannot_be_prepared_is_not_asked_for_again(error, caplog):
    backlogs = Backlogs(error)
    await backlogs.prepared()
    assert set(await backlogs.sizes(4 * ENOUGH)) == {USUAL}
    assert backlogs.num_prepared == 1
    assert f"one: cannot prepare batches of 8: {error}" in caplog.text


async def test_bulk_images_are_no_backlog_while_others_come(backlogs):
    await backlogs.prepared()
    backlogs.network.now += ALONE_S - 0.01  # others came just now, for the preparation
    assert set(await backlogs.sizes(0, 2 * ENOUGH)) == {USUAL}
    backlogs.network.now += 0.02
    assert LARGE in await backlogs.sizes(0, 2 * ENOUGH)
    assert set(await backlogs.sizes(1, 2 * ENOUGH)) == {USUAL, 1}
    assert LARGE in await backlogs.sizes(ENOUGH + USUAL, 2 * ENOUGH)  # a backlog themselves


async def test_bulk_images_beside_others_prepare_nothing(backlogs):
    submit(backlogs.queue, [image(0)])
    await backlogs.sizes(0, 2 * ENOUGH)
    assert backlogs.num_prepared == 0
    backlogs.network.now += ALONE_S
    await backlogs.sizes(0, 2 * ENOUGH)
    assert backlogs.num_prepared == 1


async def test_where_a_larger_batch_is_near_none_is_taken_ahead(backlogs):
    queue = backlogs.queue
    await begin(queue, 0)
    for num_waiting, is_whole in ((USUAL - 1, False), (USUAL, True), (2 * USUAL, False)):
        submit(queue, images(*range(num_waiting - len(queue))))
        assert queue.has_whole_batch is is_whole
    await backlogs.network.finish_all()


@pytest.mark.parametrize("timeout_s", [math.nan, 0.0, -1.0, -math.inf])
async def test_a_timeout_that_leaves_no_time_is_refused(network, queue, timeout_s):
    with pytest.raises(DeadlineError, match="no time is left for this image; try again"):
        submit(queue, [image(1)], timeout_s)
    await settle()
    assert (len(queue), network.batches) == (0, [])


async def test_an_image_whose_deadline_passed_in_the_queue_never_runs(network, queue):
    await begin(queue, 0)
    (late,) = submit(queue, [image(1)], timeout_s=1.0)
    (near,) = submit(queue, [image(3)], timeout_s=1.9)  # the fastest run took 1 s
    (patient,) = submit(queue, [image(2)], timeout_s=2.1)
    network.now += 1.0
    await network.finish_all()
    with pytest.raises(DeadlineError, match=r"after 1\.000 s in the queue"):
        await late
    with pytest.raises(DeadlineError, match=r"or is too close, .* in the queue; try again"):
        await near
    assert number_of(await patient) == 2
    assert network.batches == [[0], [2]]


BOUNDED = settings(max_examples=250, deadline=None, database=None)
TIMEOUTS = st.sampled_from([0.5, 1.0, 2.0, math.inf])
STEP = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 5), TIMEOUTS),
    st.tuples(st.just("cancel"), st.integers(0, 40)),
    st.tuples(st.just("wait"), st.sampled_from([0.25, 1.0, 3.0])),
    st.tuples(st.just("finish")),
    st.tuples(st.just("settle")),
)


class Script:
    """Plays steps on a queue and remembers what was asked of it."""

    def __init__(self, max_batch_size: int, max_queued: int, bad: set[int]) -> None:
        self.network = SteppedNetwork(bad)
        self.max_queued = max_queued
        self.queue = make_queue(self.network, max_batch_size, max_queued)
        self.submitted: list[tuple[int, float, ImageFuture]] = []

    async def play(self, steps: list[tuple]) -> None:
        for name, *values in steps:
            getattr(self, name)(*values)
            if name != "submit":  # several submissions may come within one turn of the loop
                await settle()
                assert self.network.is_running or len(self.queue) == 0, "work waits, network idle"
        await self.network.finish_all()

    def submit(self, count: int, timeout_s: float) -> None:
        first, before = len(self.submitted), len(self.queue)
        numbers = range(first, first + count)
        try:
            futures = submit(self.queue, images(*numbers), timeout_s)
        except OverloadedError:
            assert len(self.queue) <= before  # less by those that went away
            places = self.max_queued if count == 1 else form_places(self.max_queued)
            assert len(self.queue) + count > places
            return
        expires = self.network.now + timeout_s
        self.submitted += [(n, expires, f) for n, f in zip(numbers, futures, strict=True)]

    def cancel(self, which: int) -> None:
        if which < len(self.submitted):
            self.submitted[which][2].cancel()

    def wait(self, seconds: float) -> None:
        self.network.now += seconds

    def finish(self) -> None:
        if self.network.is_running:
            self.network.finish()

    def settle(self) -> None:
        """Only let the loop turn."""


@BOUNDED
@given(
    steps=st.lists(STEP, max_size=40),
    max_batch_size=st.integers(1, 4),
    max_queued=st.integers(1, 12),
    bad=st.sets(st.integers(0, 40), max_size=3),
)
def test_everyone_is_answered_once_and_rightly(steps, max_batch_size, max_queued, bad):
    async def play() -> Script:
        script = Script(max_batch_size, max_queued, bad)
        await script.play(steps)
        return script

    script = asyncio.run(play())
    batches = script.network.batches
    assert all(1 <= len(batch) <= max_batch_size for batch in batches)
    ran = [number for batch in batches for number in batch]
    first_runs = list(dict.fromkeys(ran))
    ends = {number: at for number, at, _ in script.submitted}
    for before, after in combinations(first_runs, 2):
        assert before < after or ends[before] < ends[after]
    for number, expires, future in script.submitted:
        assert future.done(), f"{number} was lost"
        assert ran.count(number) <= (2 if bad else 1)
        if future.cancelled():
            continue
        error = future.exception()
        if isinstance(error, DeadlineError):
            assert number not in ran
            assert expires - script.network.longest_s <= script.network.now
        else:
            assert (error is not None) == (number in bad)
            assert error or number_of(future.result()) == number


@BOUNDED
@given(count=st.integers(1, 30), max_batch_size=st.integers(1, 8))
def test_no_batch_is_smaller_than_what_waits(count, max_batch_size):
    async def play() -> list[int]:
        network = SteppedNetwork()
        submit(make_queue(network, max_batch_size), images(*range(count)))
        await network.finish_all()
        return [len(batch) for batch in network.batches]

    sizes = asyncio.run(play())
    assert (sizes[:-1], sum(sizes)) == ([max_batch_size] * (len(sizes) - 1), count)


@BOUNDED
@given(timeout_s=st.floats(allow_nan=True, allow_infinity=True))
def test_any_float_is_a_timeout_or_refused(timeout_s):
    async def ask() -> None:
        network = SteppedNetwork()
        queue = make_queue(network, max_queued=4)
        if timeout_s > 0:
            (future,) = submit(queue, [image(1)], timeout_s)
            await network.finish_all()
            assert number_of(future.result()) == 1
        else:
            with pytest.raises(DeadlineError):
                submit(queue, [image(1)], timeout_s)

    asyncio.run(ask())
