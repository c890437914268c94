"""The two lanes: order within each, and no starvation."""

import asyncio
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from app.queueing.batch_queue import BatchQueue
from app.queueing.priority import BULK_EVERY
from tests.support.queued_images import submit
from tests.support.steps import SteppedNetwork, image, settle

BOUNDED = settings(max_examples=150, deadline=None, database=None)
BULK = 1000  # numbers from here on are bulk images


async def run(submissions: list[tuple[int, bool]], max_batch_size: int) -> list[int]:
    """Submit (count, is_bulk) at once; return the order in which the images ran."""
    network = SteppedNetwork()
    queue = BatchQueue(network.run, range(1, max_batch_size + 1), 10_000, network.clock)
    numbers = {False: 0, True: BULK}
    for count, is_bulk in submissions:
        first = numbers[is_bulk]
        numbers[is_bulk] += count
        lane = "bulk" if is_bulk else "interactive"
        submit(queue, [image(first + i) for i in range(count)], math.inf, lane)
    await network.finish_all()
    return [number for batch in network.batches for number in batch]


SUBMISSIONS = st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=8)


@BOUNDED
@given(submissions=SUBMISSIONS, max_batch_size=st.integers(1, 9))
def test_each_lane_is_in_order_and_nothing_is_lost(submissions, max_batch_size):
    ran = asyncio.run(run(submissions, max_batch_size))
    interactive, bulk = [n for n in ran if n < BULK], [n for n in ran if n >= BULK]
    assert interactive == sorted(interactive)
    assert bulk == sorted(bulk)
    assert len(ran) == len(set(ran)) == sum(count for count, _ in submissions)


@BOUNDED
@given(interactive=st.integers(1, 60), bulk=st.integers(1, 60), max_batch_size=st.integers(1, 9))
def test_neither_lane_starves(interactive, bulk, max_batch_size):
    """While both wait, one place of eight is bulk's; the others are interactive's."""
    ran = asyncio.run(run([(bulk, True), (interactive, False)], max_batch_size))
    is_bulk = [number >= BULK for number in ran]
    both = is_bulk[: min(len(ran) - is_bulk[::-1].index(False), _last(is_bulk) + 1)]
    expected = [(place + 1) % BULK_EVERY == 0 for place in range(len(both))]
    assert both == expected


def _last(values: list[bool]) -> int:
    return len(values) - 1 - values[::-1].index(True)


async def test_an_interactive_image_overtakes_a_form():
    network = SteppedNetwork()
    queue = BatchQueue(network.run, range(1, 5), 100, network.clock)
    submit(queue, [image(BULK + i) for i in range(20)], math.inf, "bulk")
    await settle()  # the first four run
    submit(queue, [image(1)])
    await network.finish_all()
    assert network.batches[0] == [BULK, BULK + 1, BULK + 2, BULK + 3]
    assert 1 in network.batches[1]


async def test_ten_thousand_callers_that_all_leave_cost_nothing_more():
    network = SteppedNetwork()
    queue = BatchQueue(network.run, range(1, 9), 13_333, network.clock)  # a form may fill 10,000
    futures = submit(queue, [image(i) for i in range(10_000)])
    await settle()
    for future in futures:
        future.cancel()
    await network.finish_all()
    assert len(network.batches) == 1  # what had begun
    assert len(queue) == 0
    assert len(submit(queue, [image(i) for i in range(10_000)])) == 10_000


async def test_the_age_of_the_oldest_that_somebody_wants():
    network = SteppedNetwork()
    queue = BatchQueue(network.run, range(1, 2), 100, network.clock)
    assert queue.oldest_age_s == 0
    submit(queue, [image(0)])
    await settle()
    gone = submit(queue, [image(1)], math.inf, "bulk")
    network.now = 2.0
    submit(queue, [image(2)])
    network.now = 5.0
    assert queue.oldest_age_s == 5.0
    gone[0].cancel()
    assert queue.oldest_age_s == 3.0
    await network.finish_all()


async def test_settings_change_while_it_works():
    network = SteppedNetwork()
    queue = BatchQueue(network.run, range(1, 9), 100, network.clock)
    submit(queue, [image(i) for i in range(20)])
    await settle()
    queue.max_batch_size = 2
    await network.finish_all()
    assert [len(batch) for batch in network.batches] == [8, 2, 2, 2, 2, 2, 2]
