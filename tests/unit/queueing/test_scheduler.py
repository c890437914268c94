"""The batch scheduler: who goes next, and how many at a time."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import NotReadyError
from app.queueing.batch_queue import BatchQueue
from app.queueing.scheduler import BatchScheduler
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
