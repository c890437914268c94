"""The two lanes: order within each, and no starvation."""

import asyncio
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from app.queueing.batch_queue import BatchQueue
from app.queueing.priority import BULK_EVERY, LANES, SHADOW, Lane, PriorityQueue
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
        lane: Lane = "bulk" if is_bulk else "interactive"
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


class Entry:
    """An entry of :class:`PriorityQueue`."""

    def __init__(self, lane: Lane) -> None:
        self.lane: Lane = lane
        self.is_over = False

    def is_gone(self) -> bool:
        return self.is_over


STEPS = st.one_of(
    st.sampled_from([*LANES, SHADOW]),  # one more comes to the lane
    st.integers(0, 9),  # the one in this place goes away
    st.sampled_from(["forget", "pop"]),
)


@BOUNDED
@given(steps=st.lists(STEPS, max_size=40))
def test_whoever_waits_has_a_turn_also_after_others_were_forgotten(steps):
    queue: PriorityQueue[Entry] = PriorityQueue()
    waiting: list[Entry] = []
    for step in steps:
        if isinstance(step, int):
            for entry in waiting[step : step + 1]:
                entry.is_over = True
        elif step == "forget":
            queue.forget_the_gone()
            waiting = [entry for entry in waiting if not entry.is_over]
        elif step == "pop":
            if queue:
                entry = queue.pop()
                assert entry is next(other for other in waiting if other.lane == entry.lane)
                assert entry.lane != SHADOW or all(other.lane == SHADOW for other in waiting)
                waiting.remove(entry)
        else:
            waiting.append(Entry(step))
            queue.extend(waiting[-1:], step)
        answered = [entry for entry in waiting if entry.lane != SHADOW]
        assert queue.num_answered == len(answered)
        assert len(queue) == len(answered or waiting)
        assert queue.is_shadow_only == bool(waiting and not answered)
        assert set(queue) == {*waiting}
    while queue:
        waiting.remove(queue.pop())
    assert not waiting


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
