"""The batch scheduler: who goes next, and how many at a time.

The two lanes: order within each, and no starvation.

Between queues: nobody's load keeps the images of others waiting, whatever it is.
"""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import NotReadyError
from app.queueing.batch_queue import LAST_BATCH_SHARE
from app.queueing.fairness import CoreShare
from app.queueing.scheduler import BULK_EVERY, LANES, LOOP_IMAGES_PER_S, SHADOW, Lane, PriorityQueue
from tests.support.cases import cases
from tests.support.queued_images import submit
from tests.support.steps import (
    SteppedNetwork,
    SteppedQueues,
    begin,
    image,
    images,
    make_queue,
    number_of,
    settle,
)

SIZES = (1, 2, 4)
MOST = SIZES[-1]
BOUNDED = settings(max_examples=150, deadline=None, database=None)
BULK = 1000  # numbers from here on are bulk images
SUBMISSIONS = st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=8)
STEPS = st.one_of(
    st.sampled_from([*LANES, SHADOW]),  # one more comes to the lane
    st.integers(0, 9),  # the one in this place goes away
    st.sampled_from(["forget", "pop"]),
)


@cases(
    "num_waiting, image_s, has_time",
    (0, 0.0, True),  # nothing waits, and nothing runs
    (0, 1e-4, True),
    (1, 0.0, True),  # nobody knows yet what an image takes
    (1, 1.0, True),
    (1, 1.1 * 2 / 2 / LOOP_IMAGES_PER_S, True),  # of two members on two places
    (1, 0.9 * 2 / 2 / LOOP_IMAGES_PER_S, False),  # so fast that the loop would be busy
    (8, 1.0, False),  # a batch for each core
)
async def test_the_event_loop_has_time_to_decode(num_waiting, image_s, has_time):
    played = SteppedQueues(2, 2)
    for queue in played.queues:
        queue.image_s = image_s
    if num_waiting:
        submit(played.queues[1], images(*range(num_waiting)))
    assert played.scheduler.leaves_loop_time(None) is has_time


async def test_networks_of_another_set_do_not_say_what_an_image_takes():
    mine, others = CoreShare(), CoreShare()
    played = SteppedQueues(2, shares=(mine, others))
    for queue, image_s in zip(played.queues, (1e-4, 1.0), strict=True):
        queue.image_s = image_s
        submit(queue, [image(0)])
    assert not played.scheduler.leaves_loop_time(mine)
    assert played.scheduler.leaves_loop_time(others)


async def test_a_queue_knows_what_an_image_takes():
    played = SteppedQueues(sizes=(4,))
    for taken_s, expected in ((0.4, 0.1), (4.0, 0.1 + LAST_BATCH_SHARE * (1.0 - 0.1))):
        await begin(played.queues[0], 0, 1, 2, 3)
        played.tick(taken_s)
        await played.finish(0)
        assert played.queues[0].image_s == pytest.approx(expected)


@pytest.mark.parametrize("lane", ["interactive", "bulk"])
async def test_the_turn_of_an_image_that_is_gone_is_the_next_ones(lane):
    """Not that of its own queue, where a younger one waits, or one of a form."""
    played = SteppedQueues(2)
    first, second = played.queues
    await begin(second, 0)
    (gone,) = submit(first, [image(1)])
    played.tick()
    submit(second, [image(2)])
    played.tick()
    submit(first, [image(3)], lane=lane)
    gone.cancel()
    await played.finish(1)
    assert played.batches == [[], [[0], [2]]]
    await played.finish_all()


@cases(
    "sizes, num_waiting, batches",
    (SIZES, 1, [1]),
    (SIZES, 3, [2, 1]),
    (SIZES, 4, [4]),
    (SIZES, 5, [4, 1]),
    (SIZES, 7, [4, 2, 1]),
    (SIZES, 9, [4, 4, 1]),
    ((4, 8), 3, [3]),  # fewer than the smallest go at once, and the runtime pads
)
async def test_no_batch_is_padded_when_a_smaller_size_is_filled(sizes, num_waiting, batches):
    played = SteppedQueues(sizes=sizes)
    await begin(played.queues[0], *range(num_waiting))
    assert played.sizes == [batches[:1]]  # without a place ahead none is taken
    await played.finish_all()
    assert played.sizes == [batches]


async def test_images_of_one_turn_of_the_loop_share_a_batch():
    played = SteppedQueues()
    for number in range(4):
        submit(played.queues[0], [image(number)])
    await settle()
    assert played.batches == [[[0, 1, 2, 3]]]
    await played.finish_all()


@settings(max_examples=100, deadline=None, database=None)
@given(
    num_places=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=40),
)
def test_no_place_is_free_while_an_image_waits(num_places: int, steps: list[tuple[int, int]]):
    async def play() -> None:
        played = SteppedQueues(3, num_places)
        futures: list[Any] = []
        for which, count in steps:
            if not count and played.networks[which].is_running:
                played.networks[which].finish()
            numbers = range(len(futures), len(futures) + count)
            futures += await begin(played.queues[which], *numbers)
            assert len(played.running) <= num_places
            assert len(played.running) == num_places or not played.num_waiting
        await played.finish_all()
        assert sorted(number_of(f.result()) for f in futures) == list(range(len(futures)))

    asyncio.run(play())


async def test_a_whole_batch_is_taken_ahead_of_its_place():
    """Who runs it can begin it without the loop; of less than a whole one more may come."""
    played = SteppedQueues(num_ahead=1)
    (queue,) = played.queues
    await begin(queue, *range(4))
    await begin(queue, *range(4, 7))
    assert played.sizes == [[4]]
    await begin(queue, 7)
    assert played.sizes == [[4, 4]]
    await begin(queue, *range(8, 12))
    assert len(queue) == 4, "one batch ahead, no more"
    await played.finish(0)
    assert played.batches[0][2:] == [[8, 9, 10, 11]]
    await played.finish_all()


async def test_ahead_too_the_oldest_goes_first():
    played = SteppedQueues(2, num_ahead=1)
    first, second = played.queues
    await begin(first, 0)
    submit(second, images(*range(4)))
    played.tick()
    await begin(first, *range(4))
    assert played.taken == [0, 1]
    await played.finish_all()


async def test_bulk_images_are_not_taken_ahead():
    """A photo that comes meanwhile would wait for them."""
    played = SteppedQueues(num_ahead=1)
    (queue,) = played.queues
    await begin(queue, 0)
    await begin(queue, *range(1, 9), lane="bulk")
    assert played.batches == [[[0]]]
    submit(queue, [image(9)])
    await played.finish(0)
    assert played.batches[0][1][0] == 9
    await played.finish_all()


async def test_a_queue_that_leaves_has_no_more_turns_and_the_others_go_on():
    played = SteppedQueues(2)
    first, second = played.queues
    (running,) = await begin(first, 0)
    (waiting,) = await begin(first, 1)
    (batch,) = first.leave()
    (late,) = submit(second, [image(2)])
    await played.finish_all()
    assert batch.done()
    assert (number_of(await running), number_of(await late)) == (0, 2)
    assert played.networks[0].batches == [[0]]
    assert isinstance(waiting.exception(), NotReadyError)


async def run(submissions: list[tuple[int, bool]], max_batch_size: int) -> list[int]:
    """Submit (count, is_bulk) at once; return the order in which the images ran."""
    network = SteppedNetwork()
    queue = make_queue(network, max_batch_size, 10_000)
    numbers = {False: 0, True: BULK}
    for count, is_bulk in submissions:
        first = numbers[is_bulk]
        numbers[is_bulk] += count
        lane: Lane = "bulk" if is_bulk else "interactive"
        submit(queue, images(*range(first, first + count)), lane=lane)
    await network.finish_all()
    return [number for batch in network.batches for number in batch]


@BOUNDED
@given(submissions=SUBMISSIONS, max_batch_size=st.integers(1, 9))
def test_each_lane_is_in_order_and_nothing_is_lost(submissions, max_batch_size):
    ran = asyncio.run(run(submissions, max_batch_size))
    interactive, bulk = [n for n in ran if n < BULK], [n for n in ran if n >= BULK]
    assert (interactive, bulk) == (sorted(interactive), sorted(bulk))
    assert len(ran) == len(set(ran)) == sum(count for count, _ in submissions)


@BOUNDED
@given(interactive=st.integers(1, 60), bulk=st.integers(1, 60), max_batch_size=st.integers(1, 9))
def test_neither_lane_starves(interactive, bulk, max_batch_size):
    """While both wait, one place of eight is bulk's; the others are interactive's."""
    ran = asyncio.run(run([(bulk, True), (interactive, False)], max_batch_size))
    is_bulk = [number >= BULK for number in ran]
    both = is_bulk[: min(len(ran) - is_bulk[::-1].index(False), _last(is_bulk) + 1)]
    assert both == [(place + 1) % BULK_EVERY == 0 for place in range(len(both))]


class Entry:
    """An entry of :class:`PriorityQueue`."""

    def __init__(self, lane: Lane) -> None:
        self.lane: Lane = lane
        self.is_over, self.due, self.share = False, 0.0, CoreShare()

    def is_gone(self) -> bool:
        return self.is_over


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
            if queue or queue.shadow:
                entry = queue.pop() if queue else queue.shadow.popleft()
                assert entry is next(other for other in waiting if other.lane == entry.lane)
                assert entry.lane != SHADOW or all(other.lane == SHADOW for other in waiting)
                waiting.remove(entry)
        else:
            waiting.append(Entry(step))
            queue.lane(step).add(waiting[-1:])
        answered = [entry for entry in waiting if entry.lane != SHADOW]
        assert len(queue) == len(answered)
        assert set(queue) == {*waiting}
    while queue:
        waiting.remove(queue.pop())
    assert waiting == [*queue.shadow]


def _last(values: list[bool]) -> int:
    return len(values) - 1 - values[::-1].index(True)


async def test_the_age_of_the_oldest_that_somebody_wants():
    network = SteppedNetwork()
    queue = make_queue(network, 1)
    assert queue.oldest_age_s == 0
    await begin(queue, 0)
    (gone,) = submit(queue, [image(1)], lane="bulk")
    network.now = 2.0
    submit(queue, [image(2)])
    network.now = 5.0
    assert queue.oldest_age_s == 5.0
    gone.cancel()
    assert queue.oldest_age_s == 3.0
    await network.finish_all()


async def test_settings_change_while_it_works():
    network = SteppedNetwork()
    queue = make_queue(network, 8)
    await begin(queue, *range(20))
    queue.max_batch_size = 2
    await network.finish_all()
    assert [len(batch) for batch in network.batches] == [8, 2, 2, 2, 2, 2, 2]


@settings(max_examples=150, deadline=None, database=None)
@given(
    num_places=st.integers(1, 3),
    num_ahead=st.integers(0, 2),
    others=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=12),
    own=st.integers(1, 3),
    lane=st.sampled_from(["interactive", "bulk"]),
)
def test_an_image_waits_for_what_was_ahead_and_two_batches_of_each_other_queue(
    num_places: int, num_ahead: int, others: list[tuple[int, int]], own: int, lane: Lane
) -> None:
    """However much comes after it, also for its own queue."""

    async def play() -> None:
        played = SteppedQueues(3, num_places, num_ahead=num_ahead)
        for which, count in others:
            submit(played.queues[which], [image(0)] * count, lane=lane)
        played.tick()
        await settle()
        ahead = played.num_waiting + len(played.running) * MOST
        futures = submit(played.queues[0], [image(1)] * own)
        taken_before = len(played.taken)
        while not all(future.done() for future in futures):
            played.tick()
            for queue in played.queues:  # a flood, of which everything is younger
                submit(queue, [image(2)] * MOST)
            await settle()
            await played.end_first()
            batches = len(played.taken) - taken_before
            # A batch of others may be as small as one image: what is ahead counts each by itself.
            most = ahead + own + 2 * len(played.queues) + num_places + num_ahead
            assert batches <= most + most // (BULK_EVERY - 1) + 1
        await played.finish_all()

    asyncio.run(play())


@pytest.mark.parametrize("num_ahead", [0, 2])
async def test_one_members_load_does_not_take_the_ensemble_from_everybody(num_ahead: int) -> None:
    """Its queue always has whole batches, taken ahead; a photo for the other waits for a few."""
    played = SteppedQueues(2, 2, num_ahead=num_ahead)
    await begin(played.queues[0], *[0] * 40)
    played.tick()
    (photo,) = submit(played.queues[1], [image(1)])
    num_batches = 0
    while not photo.done():
        played.tick()
        await begin(played.queues[0], *[2] * MOST)
        await played.end_first()
        num_batches += 1
        assert num_batches <= 40 // MOST + 4 + num_ahead
    assert not photo.cancelled()
    await played.finish_all()


async def test_a_form_for_one_member_does_not_keep_a_photo_for_another_waiting() -> None:
    played = SteppedQueues(2)
    await begin(played.queues[0], *[0] * 64, lane="bulk")
    played.tick()
    (photo,) = await begin(played.queues[1], 1)
    await played.end_first()
    assert played.taken == [0, 1], "the form's first batch ran already"
    await played.end_first()
    assert photo.done()
    await played.finish_all()


async def test_of_eight_turns_one_is_for_bulk_images_of_any_queue() -> None:
    played = SteppedQueues(2)
    await begin(played.queues[0], *[0] * 200)
    submit(played.queues[1], images(*[1] * 8), lane="bulk")
    for _ in range(2 * BULK_EVERY + 2):
        await played.end_first()
    assert played.taken.count(1) == 2
    await played.finish_all()
