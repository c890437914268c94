"""The shadow lane: turns that nobody else wants, batches that mix with no others, and hangs."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import UnhealthyError
from app.queueing import batch_queue
from app.queueing.batch_queue import BatchQueue
from app.queueing.scheduler import LANES, SHADOW, BatchScheduler, Lane
from tests.support.queued_images import submit
from tests.support.steps import SteppedNetwork, image, settle

BOUNDED = settings(max_examples=100, deadline=None, database=None)


def queues_of(turns: BatchScheduler, networks: list[SteppedNetwork]) -> list[BatchQueue]:
    clock = networks[0].clock
    return [BatchQueue(network.run, (1, 2, 4), 100, clock, turns) for network in networks]


async def test_a_shadow_waits_until_nobody_else_does() -> None:
    networks = [SteppedNetwork(), SteppedNetwork()]
    answering, shadow = queues_of(BatchScheduler(1), networks)
    submit(answering, [image(0)])
    await settle()
    networks[0].now = 1.0
    submit(shadow, [image(9)], lane=SHADOW)  # it comes before the next photo, and goes after it
    networks[0].now = 2.0
    submit(answering, [image(1)])
    networks[0].finish()
    await settle()
    assert [n.batches for n in networks] == [[[0], [1]], []]
    networks[0].finish()
    await settle()
    assert [n.batches for n in networks] == [[[0], [1]], [[9]]]
    await networks[1].finish_all()


async def test_a_shadow_has_the_places_that_are_free() -> None:
    networks = [SteppedNetwork(), SteppedNetwork()]
    answering, shadow = queues_of(BatchScheduler(2), networks)
    submit(answering, [image(0)])
    submit(shadow, [image(9)], lane=SHADOW)
    await settle()
    assert [n.batches for n in networks] == [[[0]], [[9]]]
    for network in networks:
        await network.finish_all()


async def test_a_canarys_own_copies_are_in_no_batch_of_its_answers() -> None:
    network = SteppedNetwork()
    (queue,) = queues_of(BatchScheduler(1), [network])
    submit(queue, [image(n) for n in range(10, 14)], lane=SHADOW)
    submit(queue, [image(0)])
    submit(queue, [image(1), image(2)], lane="bulk")
    await network.finish_all()
    of_answers = [0, 1, 2]
    batches = [batch for batch in network.batches if set(batch) & set(of_answers)]
    assert sorted(n for batch in batches for n in batch) == of_answers
    assert network.batches[len(batches) :] == [[10], [11], [12], [13]]  # what comes waits for one


async def test_copies_take_no_places_of_others() -> None:
    network = SteppedNetwork()
    queue = BatchQueue(network.run, (1,), 4, network.clock)
    submit(queue, [image(9)])
    await settle()  # it runs
    submit(queue, [image(n) for n in range(10, 13)], lane=SHADOW)
    for number in range(4):
        submit(queue, [image(number)])
    assert len(queue) == 4
    await network.finish_all()


async def test_copies_that_wait_make_no_queue_old() -> None:
    """Nobody waits for them: an alert on a queue's age is about clients."""
    network = SteppedNetwork()
    (queue,) = queues_of(BatchScheduler(1), [network])
    submit(queue, [image(0)])
    await settle()  # it runs
    submit(queue, [image(n) for n in range(10, 13)], lane=SHADOW)
    network.now = 9.0
    assert queue.report() == (0, 0.0)
    submit(queue, [image(1)])
    network.now = 10.0
    assert queue.report() == (1, 1.0)
    await network.finish_all()


async def test_a_batch_that_hangs_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_queue, "SHADOW_RUN_S", 0.01)
    networks = [SteppedNetwork(), SteppedNetwork()]
    answering, shadow = queues_of(BatchScheduler(1), networks)
    (copy,) = submit(shadow, [image(9)], lane=SHADOW)
    await settle()
    assert networks[1].batches == [[9]]  # nobody finishes it
    (answer,) = submit(answering, [image(0)])
    with pytest.raises(UnhealthyError, match="hangs"):
        await copy
    await settle()
    assert networks[0].batches == [[0]]
    await networks[0].finish_all()
    assert answer.done()


async def test_a_shadow_that_hangs_takes_one_place_of_several() -> None:
    networks = [SteppedNetwork(), SteppedNetwork()]
    answering, shadow = queues_of(BatchScheduler(2), networks)
    submit(shadow, [image(n) for n in (8, 9)], lane=SHADOW)
    await settle()
    assert networks[1].batches == [[8]]  # nobody finishes it
    submit(answering, [image(0)])
    await settle()
    assert networks[0].batches == [[0]]
    for network in networks:
        await network.finish_all()


async def test_the_turn_of_an_image_that_is_gone_is_no_shadows() -> None:
    """The queue has nothing but copies left, and a photo waits in another one."""
    networks = [SteppedNetwork(max_running=9), SteppedNetwork()]
    canary, answering = queues_of(BatchScheduler(1), networks)
    submit(answering, [image(0)])
    await settle()
    (gone,) = submit(canary, [image(1)])
    submit(canary, [image(9)], lane=SHADOW)
    submit(answering, [image(2)])
    gone.cancel()
    networks[1].finish()
    await settle()
    assert [n.batches for n in networks] == [[], [[0], [2]]]
    await networks[1].finish_all()
    await networks[0].finish_all()


async def test_copies_behind_images_that_are_gone_take_one_place_too() -> None:
    networks = [SteppedNetwork(max_running=9) for _ in range(3)]
    turns = BatchScheduler(3)
    queues = queues_of(turns, networks)
    gone = [submit(queue, [image(n)])[0] for n, queue in enumerate(queues)]
    for number, queue in enumerate(queues):
        submit(queue, [image(10 + number)], lane=SHADOW)
        gone[number].cancel()
    await settle()
    assert sum(network.num_running for network in networks) == 1
    for _ in queues:
        for network in networks:
            await network.finish_all()
    assert sum(len(network.batches) for network in networks) == len(queues)


async def test_a_form_has_room_while_copies_wait() -> None:
    network = SteppedNetwork()
    queue = BatchQueue(network.run, (1,), 8, network.clock)
    submit(queue, [image(9)])
    await settle()  # it runs
    submit(queue, [image(n) for n in range(10, 16)], lane=SHADOW)
    form = submit(queue, [image(n) for n in range(6)], lane="bulk")  # a quarter is for singles
    await network.finish_all()
    assert all(answer.done() for answer in form)


@BOUNDED
@given(lanes=st.lists(st.sampled_from([*LANES, SHADOW]), min_size=1, max_size=40))
def test_every_copy_goes_after_all_that_waited_with_it(lanes: list[Lane]) -> None:
    async def run() -> list[int]:
        network = SteppedNetwork()
        (queue,) = queues_of(BatchScheduler(1), [network])
        for number, lane in enumerate(lanes):
            submit(queue, [image(number)], lane=lane)
        await network.finish_all()
        return [number for batch in network.batches for number in batch]

    ran = asyncio.run(run())
    assert sorted(ran) == list(range(len(lanes)))
    copies = [lanes[number] == SHADOW for number in ran]
    assert copies == sorted(copies)
