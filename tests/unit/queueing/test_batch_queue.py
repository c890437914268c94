"""The batch queue on a network whose every run the test ends itself.

The batch size for a backlog: prepared once, used while enough images wait.

Images with a deadline in the batch queue: dropped when it is over, refused if it will be.

Whatever callers, clock and network do: what the batch queue promises.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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
from tests.support.queued_images import NumberedCall, submit
from tests.support.steps import SteppedNetwork, image, make_queue, number_of, settle


async def test_a_lone_image_starts_at_once_and_alone():
    network = SteppedNetwork()
    queue = make_queue(network)
    (future,) = submit(queue, [image(7)])
    await settle()
    assert network.batches == [[7]]  # no timer: nothing but the loop's next turns
    network.now += 0.5
    network.finish()
    result = await future
    assert number_of(result) == 7
    assert (result.queued_s, result.batch.infer_s, result.batch.size) == (0.0, 0.5, 1)


async def test_while_a_batch_runs_the_next_one_grows():
    network = SteppedNetwork()
    queue = make_queue(network)
    futures = submit(queue, [image(0)])
    await settle()
    for number in range(1, 7):
        futures += submit(queue, [image(number)])
        await settle()
    assert network.batches == [[0]]
    assert len(queue) == 6
    await network.finish_all()
    assert network.batches == [[0], [1, 2, 3, 4], [5, 6]]
    assert [number_of(await f) for f in futures] == list(range(7))
    assert [(await f).batch.size for f in futures] == [1, 4, 4, 4, 4, 2, 2]


async def test_the_time_in_the_queue_is_told_apart_from_the_run():
    network = SteppedNetwork()
    queue = make_queue(network)
    submit(queue, [image(0)])
    await settle()
    (second,) = submit(queue, [image(1)])
    network.now += 2.0
    network.finish()
    await settle()
    network.now += 0.25
    network.finish()
    result = await second
    assert (result.queued_s, result.batch.infer_s) == (2.0, 0.25)


async def test_the_worker_ends_when_idle_and_starts_again():
    network = SteppedNetwork()
    queue = make_queue(network)
    for number in (1, 2):
        before = asyncio.all_tasks()
        (future,) = submit(queue, [image(number)])
        await network.finish_all()
        assert number_of(await future) == number
        assert asyncio.all_tasks() == before


async def test_a_full_queue_takes_all_or_none():
    network = SteppedNetwork()
    queue = make_queue(network, max_queued=3)
    running = submit(queue, [image(0)])
    await settle()
    queued = submit(queue, [image(1), image(2)])
    with pytest.raises(OverloadedError, match=r"2 images are queued, and 2 more .* limit of 3"):
        submit(queue, [image(3), image(4)])
    assert len(queue) == 2
    queued += submit(queue, [image(3)])  # exactly the room there is
    await network.finish_all()
    assert [number_of(await f) for f in running + queued] == [0, 1, 2, 3]


async def test_an_image_that_makes_its_batch_fail_fails_alone():
    network = SteppedNetwork(bad={2})
    queue = make_queue(network)
    futures = submit(queue, [image(n) for n in range(4)])
    await network.finish_all()
    answers: list[Any] = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(answers[2], ValueError)
    assert [number_of(answers[n]) for n in (0, 1, 3)] == [0, 1, 3]
    assert [answers[n].batch.size for n in (0, 1, 3)] == [1, 1, 1]


async def test_images_of_different_shapes_do_not_spoil_each_other():
    network = SteppedNetwork()
    queue = make_queue(network)
    odd = np.zeros((5, 4, 3), np.uint8)
    futures = submit(queue, [image(1), odd, image(2)])
    await network.finish_all()
    assert [number_of(await f) for f in futures] == [1, 0, 2]


async def test_a_wrong_number_of_rows_is_an_error_not_somebody_elses_answer():
    async def run(batch):
        return np.zeros((len(batch) + 1, 2), np.float32)

    queue = BatchQueue(run, range(1, 5), 64)
    futures = submit(queue, [image(1), image(2)])
    answers = await asyncio.gather(*futures, return_exceptions=True)
    assert [str(a) for a in answers] == ["network returned 2 rows for 1 images"] * 2


async def test_a_caller_that_leaves_while_its_batch_runs_spoils_nothing():
    network = SteppedNetwork()
    queue = make_queue(network)
    futures = submit(queue, [image(0), image(1)])
    await settle()
    futures[0].cancel()
    network.finish()
    assert number_of(await futures[1]) == 1
    (after,) = submit(queue, [image(2)])
    await network.finish_all()
    assert number_of(await after) == 2


async def test_a_caller_that_leaves_while_its_batch_fails_is_not_run_again():
    network = SteppedNetwork(bad={1})
    queue = make_queue(network)
    futures = submit(queue, [image(0), image(1)])
    await settle()
    futures[0].cancel()
    await network.finish_all()
    assert isinstance(futures[1].exception(), ValueError)
    assert network.batches == [[0, 1], [1]]


async def test_ten_thousand_callers_that_all_leave():
    network = SteppedNetwork()
    queue = make_queue(network, max_queued=10_001)
    (first,) = submit(queue, [image(0)])
    await settle()
    callers = [asyncio.ensure_future(waiting(queue, n)) for n in range(10_000)]
    await settle()
    assert len(queue) == 10_000
    for caller in callers:
        caller.cancel()
    (last,) = submit(queue, [image(1)])
    await network.finish_all()
    assert number_of(await first) == 0
    assert number_of(await last) == 1
    assert len(network.batches) == 2  # none of the ten thousand was run
    assert len(queue) == 0
    assert all(caller.cancelled() for caller in callers)


async def test_forms_leave_places_for_single_images():
    """Interactive images go first: it must not be forms alone that have places to wait in."""
    network = SteppedNetwork()
    queue = make_queue(network, max_queued=8)
    running = submit(queue, [image(0)])
    await settle()
    forms = submit(queue, [image(n) for n in range(1, 4)], lane="bulk")
    forms += submit(queue, [image(n) for n in range(4, 7)])  # as its client asked to go first
    with pytest.raises(
        OverloadedError, match=r"6 images are queued, and 2 more .* limit of 6 \(the rest"
    ):
        submit(queue, [image(7), image(8)], lane="bulk")
    singles = [submit(queue, [image(n)])[0] for n in (9, 10)]
    with pytest.raises(
        OverloadedError, match=r"8 images are queued, and 1 more .* limit of 8; try"
    ):
        submit(queue, [image(11)])
    await network.finish_all()
    assert [number_of(await future) for future in singles] == [9, 10]
    assert all(future.done() for future in (*running, *forms))


async def waiting(queue: BatchQueue, number: int) -> BatchResult:
    (future,) = submit(queue, [image(number)])
    return await future


async def test_the_places_of_callers_that_left_are_free_again():
    network = SteppedNetwork()
    queue = make_queue(network, max_queued=2)
    submit(queue, [image(0)])
    await settle()
    gone = submit(queue, [image(1), image(2)])
    for future in gone:
        future.cancel()
    (taken,) = submit(queue, [image(3)])
    await network.finish_all()
    assert number_of(await taken) == 3


async def test_nothing_to_submit_is_no_error():
    network = SteppedNetwork()
    assert submit(make_queue(network), []) == []
    await settle()
    assert network.batches == []


def test_the_helpers_themselves():
    assert number_of(BatchResult(image(70_000)[0, 0], 0.0, ExecutedBatch(0.0, 0.0, ()))) == 70_000
    run: Callable[..., Awaitable] = SteppedNetwork().run
    assert inspect.iscoroutinefunction(run)


async def test_who_keeps_a_record_hears_of_every_batch():
    network = SteppedNetwork(bad={3})
    heard: list[ExecutedBatch] = []

    queue = BatchQueue(network.run, (1, 2), 64, network.clock, on_batch=heard.append)
    (first,) = submit(queue, [image(0)], call=7)
    await settle()
    others = submit(queue, [image(1)], call=8) + submit(queue, [image(2)])
    (bad,) = submit(queue, [image(3)], call=9)
    network.now += 2.0
    await network.finish_all()
    numbers = [
        tuple(call.number for call in batch.calls if isinstance(call, NumberedCall))
        for batch in heard
    ]
    assert list(zip(numbers, [batch.error is None for batch in heard], strict=True)) == [
        ((7,), True),
        ((8, 0), True),
        ((9,), False),
    ]
    assert (heard[0].started, heard[0].ended) == (0.0, 2.0)
    assert [heard.index((await f).batch) for f in (first, *others)] == [0, 1, 1]
    assert [(await f).batch.started for f in (first, *others)] == [0.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="3"):
        await bad


async def test_the_report_tells_length_and_age():
    network = SteppedNetwork()
    queue = make_queue(network)
    assert queue.report() == (0, 0.0)
    submit(queue, [image(0)])
    await settle()
    submit(queue, [image(n) for n in range(1, 7)])
    network.now += 0.5
    assert queue.report() == (6, 0.5)
    await network.finish_all()
    assert queue.report() == (0, 0.0)


async def test_a_batch_that_waited_for_its_thread_ran_when_it_says():
    executed: list[ExecutedBatch] = []
    clock = HandClock(0.0)

    async def run(images) -> TimedRows:
        clock.now = 9.0  # when the loop hears of it
        return TimedRows(np.zeros((len(images), 2), np.float32), 3.0, 5.0)

    queue = BatchQueue(run, (1, 4), 64, clock, on_batch=executed.append)
    (future,) = submit(queue, [image(1)])
    result = await future
    assert result.queued_s == 3.0
    assert [(batch.started, batch.ended) for batch in executed] == [(3.0, 5.0)]
    assert queue.fastest_s == 2.0


USUAL, LARGE, ENOUGH = 4, 8, 16


class Compiler:
    """What prepares, when it is let, and tells how often it was asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_prepared = 0
        self.may_end = asyncio.Event()
        self._error = error

    async def prepare(self) -> None:
        self.num_prepared += 1
        await self.may_end.wait()
        if self._error:
            raise self._error


def queue_of(network: SteppedNetwork, compiler: Compiler) -> BatchQueue:
    backlog = BacklogSize("one", USUAL, 1, compiler.prepare)
    return BatchQueue(network.run, (1, USUAL), 4096, network.clock, backlog=backlog)


async def worked_off(network: SteppedNetwork, queue: BatchQueue, num: int) -> list[int]:
    """Submit so many images, run them all, and return the sizes of their batches."""
    first = len(network.batches)
    futures = submit(queue, [image(number) for number in range(num)])
    await settle()
    await network.finish_all()
    assert [number_of(await future) for future in futures] == list(range(num))
    return [len(batch) for batch in network.batches[first:]]


async def prepared(network: SteppedNetwork, queue: BatchQueue, compiler: Compiler) -> None:
    compiler.may_end.set()
    assert set(await worked_off(network, queue, ENOUGH)) == {USUAL}
    await settle()
    assert compiler.num_prepared == 1


async def test_without_a_backlog_nothing_is_prepared():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    for _ in range(3):
        assert await worked_off(network, queue, ENOUGH - 1) == [4, 4, 4, 1, 1, 1]
    assert compiler.num_prepared == 0


async def test_the_usual_size_goes_on_while_it_is_prepared():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    for _ in range(3):
        assert await worked_off(network, queue, 2 * ENOUGH) == [USUAL] * 8
    assert compiler.num_prepared == 1


async def test_when_it_is_prepared_a_backlog_has_it():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    await prepared(network, queue, compiler)
    assert await worked_off(network, queue, 2 * ENOUGH) == [8, 8, 8, 4, 4]
    assert await worked_off(network, queue, ENOUGH - 1) == [4, 4, 4, 1, 1, 1]
    assert compiler.num_prepared == 1


async def test_every_place_must_find_a_batch():
    compiler = Compiler()
    backlog = BacklogSize("one", USUAL, 6, compiler.prepare)
    backlog.waited(6 * LARGE - 1)
    await settle()
    assert compiler.num_prepared == 0
    backlog.waited(6 * LARGE)
    compiler.may_end.set()
    await settle()
    assert backlog.is_due(6 * LARGE)
    assert not backlog.is_due(6 * LARGE - 1)


@pytest.mark.parametrize("error", [MemoryError("none is left"), RuntimeError("OpenVINO")])
async def test_one_that_cannot_be_prepared_is_not_asked_for_again(error, caplog):
    network, compiler = SteppedNetwork(), Compiler(error)
    queue = queue_of(network, compiler)
    await prepared(network, queue, compiler)
    assert set(await worked_off(network, queue, 4 * ENOUGH)) == {USUAL}
    assert compiler.num_prepared == 1
    assert f"one: cannot prepare batches of 8: {error}" in caplog.text


async def test_a_smaller_limit_of_batches_is_kept():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    await prepared(network, queue, compiler)
    queue.max_batch_size = 1
    assert set(await worked_off(network, queue, 2 * ENOUGH)) == {1}


async def test_a_large_batch_that_fails_is_run_one_by_one():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    await prepared(network, queue, compiler)
    network.bad = {3}
    futures = submit(queue, [image(number) for number in range(ENOUGH)])
    await settle()
    await network.finish_all()
    assert [len(batch) for batch in network.batches[4:]] == [8, *[1] * 8, 4, 4]
    assert [number_of(await f) for f in futures[:3]] == [0, 1, 2]
    with pytest.raises(ValueError, match="cannot run"):
        await futures[3]


async def test_bulk_images_are_no_backlog_while_others_come():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    await prepared(network, queue, compiler)
    num = 2 * ENOUGH

    async def sizes(num_others: int) -> set[int]:
        first = len(network.batches)
        submit(queue, [image(number) for number in range(num)], lane="bulk")
        if num_others:
            submit(queue, [image(number) for number in range(num_others)])
        await settle()
        await network.finish_all()
        return set(map(len, network.batches[first:]))

    network.now += ALONE_S - 0.01  # others came just now, for the preparation
    assert await sizes(0) == {USUAL}
    network.now += 0.02
    assert LARGE in await sizes(0)
    assert await sizes(1) == {USUAL, 1}
    assert LARGE in await sizes(ENOUGH + USUAL)  # those are a backlog themselves


async def test_bulk_images_beside_others_prepare_nothing():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    submit(queue, [image(0)])
    submit(queue, [image(number) for number in range(2 * ENOUGH)], lane="bulk")
    await settle()
    await network.finish_all()
    assert compiler.num_prepared == 0
    network.now += ALONE_S
    submit(queue, [image(number) for number in range(2 * ENOUGH)], lane="bulk")
    await settle()
    await network.finish_all()
    assert compiler.num_prepared == 1


async def test_where_a_larger_batch_is_near_none_is_taken_ahead():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    submit(queue, [image(0)])
    await settle()
    for num_waiting, is_whole in ((USUAL - 1, False), (USUAL, True), (2 * USUAL, False)):
        submit(queue, [image(n) for n in range(num_waiting - len(queue))])
        assert queue.has_whole_batch is is_whole
    await network.finish_all()


@pytest.mark.parametrize("timeout_s", [math.nan, 0.0, -1.0, -math.inf])
async def test_a_timeout_that_leaves_no_time_is_refused(timeout_s):
    network = SteppedNetwork()
    queue = make_queue(network)
    with pytest.raises(DeadlineError, match="no time is left for this image; try again"):
        submit(queue, [image(1)], timeout_s)
    await settle()
    assert len(queue) == 0
    assert network.batches == []


async def test_an_image_whose_deadline_passed_in_the_queue_never_runs():
    network = SteppedNetwork()
    queue = make_queue(network)
    submit(queue, [image(0)])
    await settle()
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


async def steady(network: SteppedNetwork, queue: BatchQueue, num_images: int) -> None:
    """Let a queue learn its pace: an image a second."""
    for number in range(num_images):
        submit(queue, [image(number)])
        await settle()
        network.now += 1.0
        await network.finish_all()


async def test_a_batch_or_two_may_always_wait():
    """A pace that was measured while something hung must not keep everybody out."""
    network = SteppedNetwork()
    queue = make_queue(network)
    submit(queue, [image(0)])
    await settle()
    network.now += 60.0
    await network.finish_all()
    submit(queue, [image(1)] * 8, timeout_s=100.0)
    (future,) = submit(queue, [image(2)], timeout_s=100.0)
    await network.finish_all()
    assert number_of(await future) == 2


BOUNDED = settings(max_examples=250, deadline=None, database=None)
TIMEOUTS = st.sampled_from([0.5, 1.0, 2.0, math.inf])
STEP = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 5), TIMEOUTS),
    st.tuples(st.just("cancel"), st.integers(0, 40)),
    st.tuples(st.just("wait"), st.sampled_from([0.25, 1.0, 3.0])),
    st.tuples(st.just("finish")),
    st.tuples(st.just("settle")),
)


@dataclass
class Submitted:
    number: int
    expires: float
    future: asyncio.Future[BatchResult]


class Script:
    """Plays steps on a queue and remembers what was asked of it."""

    def __init__(self, max_batch_size: int, max_queued: int, bad: set[int]) -> None:
        self.network = SteppedNetwork(bad)
        self.max_queued = max_queued
        self.queue = BatchQueue(
            self.network.run, range(1, max_batch_size + 1), max_queued, self.network.clock
        )
        self.submitted: list[Submitted] = []

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
            futures = submit(self.queue, [image(n) for n in numbers], timeout_s)
        except OverloadedError:
            assert len(self.queue) <= before  # less by those that went away
            places = self.max_queued if count == 1 else form_places(self.max_queued)
            assert len(self.queue) + count > places
            return
        except DeadlineError:
            assert before > 2 * self.queue.max_batch_size
            assert timeout_s < math.inf
            return
        expires = self.network.now + timeout_s
        self.submitted += [Submitted(n, expires, f) for n, f in zip(numbers, futures, strict=True)]

    def cancel(self, which: int) -> None:
        if which < len(self.submitted):
            self.submitted[which].future.cancel()

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
    assert first_runs == sorted(first_runs)  # oldest first
    for one in script.submitted:
        check_outcome(one, ran.count(one.number), one.number in bad, bool(bad), script)


def check_outcome(
    one: Submitted, times_run: int, is_bad: bool, may_run_twice: bool, script: Script
) -> None:
    assert one.future.done(), f"{one.number} was lost"
    assert times_run <= (2 if may_run_twice else 1)
    if one.future.cancelled():
        return
    error = one.future.exception()
    if isinstance(error, DeadlineError):
        assert times_run == 0
        assert one.expires - script.network.longest_s <= script.network.now
    elif error is not None:
        assert is_bad
    else:
        assert not is_bad
        assert number_of(one.future.result()) == one.number


@BOUNDED
@given(count=st.integers(1, 30), max_batch_size=st.integers(1, 8))
def test_no_batch_is_smaller_than_what_waits(count, max_batch_size):
    async def play() -> list[int]:
        network = SteppedNetwork()
        submit(
            BatchQueue(network.run, range(1, max_batch_size + 1), 64, network.clock),
            [image(n) for n in range(count)],
        )
        await network.finish_all()
        return [len(batch) for batch in network.batches]

    sizes = asyncio.run(play())
    assert sizes[:-1] == [max_batch_size] * (len(sizes) - 1)
    assert sum(sizes) == count


@BOUNDED
@given(timeout_s=st.floats(allow_nan=True, allow_infinity=True))
def test_any_float_is_a_timeout_or_refused(timeout_s):
    async def ask() -> None:
        network = SteppedNetwork()
        queue = BatchQueue(network.run, range(1, 5), 4, network.clock)
        if timeout_s > 0:
            (future,) = submit(queue, [image(1)], timeout_s)
            await network.finish_all()
            assert number_of(future.result()) == 1
        else:
            with pytest.raises(DeadlineError):
                submit(queue, [image(1)], timeout_s)

    asyncio.run(ask())
