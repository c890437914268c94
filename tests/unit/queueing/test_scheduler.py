"""The batch scheduler: who goes next, and how many at a time.

The two lanes: order within each, and no starvation.

Between queues: nobody's load keeps the images of others waiting, whatever it is.
"""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import NotReadyError
from app.queueing.batch_queue import LAST_BATCH_SHARE, BatchQueue
from app.queueing.scheduler import (
    BULK_EVERY,
    LANES,
    LOOP_IMAGES_PER_S,
    SHADOW,
    BatchScheduler,
    CoreShare,
    Lane,
    PriorityQueue,
)
from tests.support.queued_images import submit
from tests.support.steps import SteppedNetwork, image, number_of, settle


def queues_of(
    turns: BatchScheduler, networks: list[SteppedNetwork], sizes: tuple[int, ...] = (1, 2, 4)
):
    clock = networks[0].clock
    return [BatchQueue(network.run, sizes, 100, clock, turns) for network in networks]


async def test_two_queues_share_one_place_oldest_first():
    networks = [SteppedNetwork(), SteppedNetwork()]
    first, second = queues_of(BatchScheduler(1), networks)
    submit(first, [image(0)])
    await settle()
    networks[0].now = 1.0
    submit(second, [image(1)])
    networks[0].now = 2.0
    submit(first, [image(2)])
    await settle()
    assert [n.batches for n in networks] == [[[0]], []]
    networks[0].finish()
    await settle()
    assert [n.batches for n in networks] == [[[0]], [[1]]]  # it waited longer than 2
    networks[1].finish()
    await settle()
    assert [n.batches for n in networks] == [[[0], [2]], [[1]]]
    await networks[0].finish_all()


@pytest.mark.parametrize(
    ("num_waiting", "image_s", "has_time"),
    [
        (0, 0.0, True),  # nothing waits, and nothing runs
        (0, 1e-4, True),
        (1, 0.0, True),  # nobody knows yet what an image takes
        (1, 1.0, True),
        (1, 1.1 * 2 / 2 / LOOP_IMAGES_PER_S, True),  # of two members on two places
        (1, 0.9 * 2 / 2 / LOOP_IMAGES_PER_S, False),  # so fast that the loop would be busy
        (8, 1.0, False),  # a batch for each core
    ],
)
async def test_the_event_loop_has_time_to_decode(num_waiting, image_s, has_time):
    networks = [SteppedNetwork(), SteppedNetwork()]
    turns = BatchScheduler(2)
    queues = queues_of(turns, networks)
    for queue in queues:
        queue.image_s = image_s
    if num_waiting:
        submit(queues[1], [image(number) for number in range(num_waiting)])
    assert turns.leaves_loop_time(None) is has_time


async def test_networks_of_another_set_do_not_say_what_an_image_takes():
    networks = [SteppedNetwork(), SteppedNetwork()]
    turns, (mine, others) = BatchScheduler(1), (CoreShare(), CoreShare())
    for network, share, image_s in zip(networks, (mine, others), (1e-4, 1.0), strict=True):
        queue = BatchQueue(network.run, (1, 2), 100, network.clock, turns, share=share)
        queue.image_s = image_s
        submit(queue, [image(0)])
    assert not turns.leaves_loop_time(mine)
    assert turns.leaves_loop_time(others)


async def test_a_queue_knows_what_an_image_takes():
    network = SteppedNetwork()
    queue = BatchQueue(network.run, (4,), 100, network.clock, BatchScheduler(1))
    for taken_s, expected in ((0.4, 0.1), (4.0, 0.1 + LAST_BATCH_SHARE * (1.0 - 0.1))):
        submit(queue, [image(number) for number in range(4)])
        await settle()
        network.now += taken_s
        network.finish()
        await settle()
        assert queue.image_s == pytest.approx(expected)


@pytest.mark.parametrize("lane", ["interactive", "bulk"])
async def test_the_turn_of_an_image_that_is_gone_is_the_next_ones(lane):
    """Not that of its own queue, where a younger one waits, or one of a form."""
    networks = [SteppedNetwork(), SteppedNetwork()]
    first, second = queues_of(BatchScheduler(1), networks)
    submit(second, [image(0)])
    await settle()
    (gone,) = submit(first, [image(1)])
    networks[0].now = 1.0
    submit(second, [image(2)])
    networks[0].now = 2.0
    submit(first, [image(3)], lane=lane)
    gone.cancel()
    networks[1].finish()
    await settle()
    assert [n.batches for n in networks] == [[], [[0], [2]]]
    networks[1].finish()
    await networks[0].finish_all()


async def test_two_places_run_two_batches_of_one_queue():
    network = SteppedNetwork(max_running=2)
    (queue,) = queues_of(BatchScheduler(2), [network])
    futures = submit(queue, [image(n) for n in range(6)])
    await settle()
    assert network.batches == [[0, 1, 2, 3], [4, 5]]
    await network.finish_all()
    assert [number_of(await f) for f in futures] == list(range(6))


@pytest.mark.parametrize(
    ("num_waiting", "batches"),
    [(1, [1]), (3, [2, 1]), (4, [4]), (5, [4, 1]), (7, [4, 2, 1]), (9, [4, 4, 1])],
)
async def test_no_batch_is_padded_when_a_smaller_size_is_filled(num_waiting, batches):
    network = SteppedNetwork()
    (queue,) = queues_of(BatchScheduler(1), [network])
    submit(queue, [image(n) for n in range(num_waiting)])
    await network.finish_all()
    assert [len(batch) for batch in network.batches] == batches


async def test_images_of_one_turn_of_the_loop_share_a_batch():
    network = SteppedNetwork()
    (queue,) = queues_of(BatchScheduler(1), [network])
    for number in range(4):
        submit(queue, [image(number)])
    await settle()
    assert network.batches == [[0, 1, 2, 3]]
    await network.finish_all()


async def test_fewer_than_the_smallest_size_go_at_once():
    network = SteppedNetwork()
    (queue,) = queues_of(BatchScheduler(1), [network], sizes=(4, 8))
    submit(queue, [image(n) for n in range(3)])
    await settle()
    assert network.batches == [[0, 1, 2]]  # the runtime pads
    await network.finish_all()
    await network.finish_all()


@settings(max_examples=100, deadline=None, database=None)
@given(
    num_places=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=40),
)
def test_no_place_is_free_while_an_image_waits(num_places: int, steps: list[tuple[int, int]]):
    async def play() -> None:
        networks = [SteppedNetwork(max_running=4) for _ in range(3)]
        queues = queues_of(BatchScheduler(num_places), networks)
        futures: list[Any] = []
        for which, count in steps:
            if not count and networks[which].is_running:
                networks[which].finish()
            futures += submit(queues[which], [image(len(futures) + n) for n in range(count)])
            await settle()
            running = sum(network.num_running for network in networks)
            assert running <= num_places
            assert running == num_places or not any(len(queue) for queue in queues)
        for _ in range(len(futures)):
            for network in networks:
                await network.finish_all()
        assert sorted(number_of(f.result()) for f in futures) == list(range(len(futures)))

    asyncio.run(play())


async def test_a_whole_batch_is_taken_ahead_of_its_place():
    """Who runs it can begin it without the loop; of less than a whole one more may come."""
    network = SteppedNetwork(max_running=2)
    (queue,) = queues_of(BatchScheduler(1, num_ahead=1), [network])
    submit(queue, [image(n) for n in range(4)])
    await settle()
    submit(queue, [image(n) for n in range(4, 7)])
    await settle()
    assert [len(batch) for batch in network.batches] == [4]
    submit(queue, [image(7)])
    await settle()
    assert [len(batch) for batch in network.batches] == [4, 4]
    submit(queue, [image(n) for n in range(8, 12)])
    await settle()
    assert len(queue) == 4, "one batch ahead, no more"
    network.finish()
    await settle()
    assert network.batches[2:] == [[8, 9, 10, 11]]
    await network.finish_all()


async def test_ahead_too_the_oldest_goes_first():
    networks = [SteppedNetwork(max_running=3) for _ in range(2)]
    first, second = queues_of(BatchScheduler(1, num_ahead=1), networks)
    submit(first, [image(0)])
    await settle()
    submit(second, [image(n) for n in range(4)])
    networks[0].now = 1.0
    submit(first, [image(n) for n in range(4)])
    await settle()
    assert [len(n.batches) for n in networks] == [1, 1]
    for network in networks:
        await network.finish_all()


async def test_bulk_images_are_not_taken_ahead():
    """A photo that comes meanwhile would wait for them."""
    network = SteppedNetwork(max_running=2)
    (queue,) = queues_of(BatchScheduler(1, num_ahead=1), [network])
    submit(queue, [image(0)])
    await settle()
    submit(queue, [image(n) for n in range(1, 9)], lane="bulk")
    await settle()
    assert len(network.batches) == 1
    submit(queue, [image(9)])
    network.finish()
    await settle()
    assert network.batches[1][0] == 9
    await network.finish_all()


async def test_without_a_place_ahead_none_is_taken():
    network = SteppedNetwork()
    (queue,) = queues_of(BatchScheduler(1), [network])
    submit(queue, [image(n) for n in range(8)])
    await settle()
    assert [len(batch) for batch in network.batches] == [4]
    await network.finish_all()


async def test_a_queue_that_leaves_has_no_more_turns_and_the_others_go_on():
    networks = [SteppedNetwork(), SteppedNetwork()]
    first, second = queues_of(BatchScheduler(1), networks)
    running = submit(first, [image(0)])
    await settle()
    waiting = submit(first, [image(1)])
    (batch,) = first.leave()
    late = submit(second, [image(2)])
    await networks[0].finish_all()
    assert batch.done()
    assert number_of(await running[0]) == 0
    await networks[1].finish_all()
    assert number_of(await late[0]) == 2
    assert networks[0].batches == [[0]]
    assert isinstance(waiting[0].exception(), NotReadyError)


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


SIZES = (1, 2, 4)
MOST = SIZES[-1]


@dataclass
class Played:
    """Queues with one scheduler, on networks whose batches end one by one, in order."""

    num_queues: int
    num_places: int
    num_ahead: int
    networks: list[SteppedNetwork] = field(init=False)
    queues: list[BatchQueue] = field(init=False)
    taken: list[int] = field(default_factory=list)  # the queue of each batch, in order
    _num_ended: int = 0

    def __post_init__(self) -> None:
        self.networks = [SteppedNetwork(max_running=99) for _ in range(self.num_queues)]
        turns = BatchScheduler(self.num_places, num_ahead=self.num_ahead)
        self.queues = [
            BatchQueue(self.runs(which), SIZES, 10_000, self.networks[0].clock, turns)
            for which in range(self.num_queues)
        ]

    def runs(self, which: int):
        async def run(images):
            self.taken.append(which)
            return await self.networks[which].run(images)

        return run

    @property
    def now(self) -> float:
        return self.networks[0].now

    def tick(self) -> None:
        """Let time pass, so that what comes next is younger."""
        self.networks[0].now += 1.0

    async def drain(self) -> None:
        """Run all that waits."""
        while any(network.is_running for network in self.networks):
            await self.end_one()

    async def end_one(self) -> None:
        """End the batch that was taken first of those that run."""
        if self._num_ended < len(self.taken):
            self.networks[self.taken[self._num_ended]].finish()
            self._num_ended += 1
        await settle()


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
        played = Played(3, num_places, num_ahead)
        for which, count in others:
            submit(played.queues[which], [image(0)] * count, lane=lane)
        played.tick()
        await settle()
        ahead = sum(map(len, played.queues)) + sum(n.num_running for n in played.networks) * MOST
        futures = submit(played.queues[0], [image(1)] * own)
        taken_before = len(played.taken)
        while not all(future.done() for future in futures):
            played.tick()
            for queue in played.queues:  # a flood, of which everything is younger
                submit(queue, [image(2)] * MOST)
            await settle()
            await played.end_one()
            batches = len(played.taken) - taken_before
            # A batch of others may be as small as one image: what is ahead counts each by itself.
            most = ahead + own + 2 * len(played.queues) + num_places + num_ahead
            assert batches <= most + most // (BULK_EVERY - 1) + 1
        await played.drain()

    asyncio.run(play())


@pytest.mark.parametrize("num_ahead", [0, 2])
async def test_one_members_load_does_not_take_the_ensemble_from_everybody(num_ahead: int) -> None:
    """Its queue always has whole batches, taken ahead; a photo for the other waits for a few."""
    played = Played(2, num_places=2, num_ahead=num_ahead)
    submit(played.queues[0], [image(0)] * 40)
    await settle()
    played.tick()
    (photo,) = submit(played.queues[1], [image(1)])
    num_batches = 0
    while not photo.done():
        played.tick()
        submit(played.queues[0], [image(2)] * MOST)
        await settle()
        await played.end_one()
        num_batches += 1
        assert num_batches <= 40 // MOST + 4 + num_ahead
    assert not photo.cancelled()
    await played.drain()


async def test_a_form_for_one_member_does_not_keep_a_photo_for_another_waiting() -> None:
    played = Played(2, num_places=1, num_ahead=0)
    submit(played.queues[0], [image(0)] * 64, lane="bulk")
    await settle()
    played.tick()
    (photo,) = submit(played.queues[1], [image(1)])
    await settle()
    await played.end_one()
    assert played.taken == [0, 1], "the form's first batch ran already"
    await played.end_one()
    assert photo.done()
    await played.drain()


async def test_of_eight_turns_one_is_for_bulk_images_of_any_queue() -> None:
    played = Played(2, num_places=1, num_ahead=0)
    submit(played.queues[0], [image(0)] * 200)
    await settle()
    submit(played.queues[1], [image(1)] * 8, lane="bulk")
    for _ in range(2 * BULK_EVERY + 2):
        await played.end_one()
    assert played.taken.count(1) == 2
    await played.drain()
