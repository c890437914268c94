"""The batch queue on a network whose every run the test ends itself."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from app.errors import OverloadedError
from app.queueing.batch_queue import BatchQueue
from app.queueing.batch_records import BatchResult, ExecutedBatch, TimedRows
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
