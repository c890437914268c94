"""The shadow lane: turns that nobody else wants, batches that mix with no others, and hangs."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import UnhealthyError
from app.queueing import batch_queue
from app.queueing.batch_queue import BatchQueue
from app.queueing.scheduler import LANES, SHADOW, BatchScheduler, Lane
from tests.support import steps
from tests.support.queued_images import submit

BOUNDED = settings(max_examples=100, deadline=None, database=None)


async def test_a_shadow_waits_until_nobody_else_does() -> None:
    played = steps.SteppedQueues(2)
    answering, shadow = played.queues
    await steps.begin(answering, 0)
    played.tick()
    # It comes before the next photo, and goes after it.
    submit(shadow, [steps.image(9)], lane=SHADOW)
    played.tick()
    submit(answering, [steps.image(1)])
    await played.finish(0)
    assert played.batches == [[[0], [1]], []]
    await played.finish(0)
    assert played.batches == [[[0], [1]], [[9]]]
    await played.finish_all()


async def test_a_copy_that_is_due_goes_first_alone_and_by_turns() -> None:
    played = steps.SteppedQueues(2)
    answering, shadow = played.queues
    await steps.begin(answering, 0)
    submit(answering, steps.images(1, 2))
    for queue in played.queues:  # of one copy, which is compared with both versions
        submit(queue, [steps.image(9)], lane=SHADOW)
    played.scheduler.copy_is_due = True
    await played.finish(0)
    assert played.batches == [[[0], [9]], []]
    await played.finish(0)
    assert played.batches == [[[0], [9], [1, 2]], []]
    submit(answering, [steps.image(3)])
    await played.finish(0)
    assert played.batches == [[[0], [9], [1, 2]], [[9]]]
    played.scheduler.copy_is_due = False
    submit(shadow, [steps.image(8)], lane=SHADOW)
    await played.finish(1)
    assert played.batches == [[[0], [9], [1, 2], [3]], [[9]]]
    await played.finish_all()


async def test_a_canarys_own_copies_are_in_no_batch_of_its_answers() -> None:
    played = steps.SteppedQueues()
    (queue,) = played.queues
    submit(queue, steps.images(*range(10, 14)), lane=SHADOW)
    submit(queue, [steps.image(0)])
    submit(queue, steps.images(1, 2), lane="bulk")
    await played.finish_all()
    *batches, eleventh, twelfth, thirteenth, last = played.batches[0]
    assert sorted(n for batch in batches for n in batch) == [0, 1, 2]
    # What comes waits for one copy alone.
    assert [eleventh, twelfth, thirteenth, last] == [[10], [11], [12], [13]]


async def test_copies_that_wait_make_no_queue_old() -> None:
    """Nobody waits for them: an alert on a queue's age is about clients."""
    played = steps.SteppedQueues()
    (queue,) = played.queues
    await steps.begin(queue, 0)
    submit(queue, steps.images(*range(10, 13)), lane=SHADOW)
    played.tick(9.0)
    assert queue.report() == (0, 0.0)
    submit(queue, [steps.image(1)])
    played.tick()
    assert queue.report() == (1, 1.0)
    await played.finish_all()


async def test_a_batch_that_hangs_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_queue, "SHADOW_RUN_S", 0.01)
    networks = [steps.SteppedNetwork(), steps.SteppedNetwork()]
    turns = BatchScheduler(1)
    answering, shadow = (
        BatchQueue(network.run, (1, 2, 4), 100, networks[0].clock, turns) for network in networks
    )
    (copy,) = await steps.begin(shadow, 9, lane=SHADOW)
    assert networks[1].batches == [[9]]  # nobody finishes it
    (answer,) = submit(answering, [steps.image(0)])
    with pytest.raises(UnhealthyError, match="hangs"):
        await copy
    await steps.settle()
    assert networks[0].batches == [[0]]
    await networks[0].finish_all()
    assert answer.done()


async def test_a_shadow_that_hangs_takes_one_place_of_several() -> None:
    played = steps.SteppedQueues(2, 2)
    answering, shadow = played.queues
    await steps.begin(shadow, 8, 9, lane=SHADOW)
    assert played.batches == [[], [[8]]]  # nobody finishes it
    await steps.begin(answering, 0)
    assert played.batches == [[[0]], [[8]]]
    await played.finish_all()


async def test_the_turn_of_an_image_that_is_gone_is_no_shadows() -> None:
    """The queue has nothing but copies left, and a photo waits in another one."""
    played = steps.SteppedQueues(2)
    canary, answering = played.queues
    await steps.begin(answering, 0)
    (gone,) = submit(canary, [steps.image(1)])
    submit(canary, [steps.image(9)], lane=SHADOW)
    submit(answering, [steps.image(2)])
    gone.cancel()
    await played.finish(1)
    assert played.batches == [[], [[0], [2]]]
    await played.finish_all()


async def test_copies_behind_images_that_are_gone_take_one_place_too() -> None:
    played = steps.SteppedQueues(3, 3)
    gone = [submit(queue, [steps.image(0)])[0] for queue in played.queues]
    for queue, future in zip(played.queues, gone, strict=True):
        submit(queue, [steps.image(10)], lane=SHADOW)
        future.cancel()
    await steps.settle()
    assert len(played.running) == 1
    await played.finish_all()
    assert len(played.taken) == 3


async def test_a_form_has_room_while_copies_wait() -> None:
    network = steps.SteppedNetwork()
    queue = steps.make_queue(network, 1, 8)
    await steps.begin(queue, 9)
    submit(queue, steps.images(*range(10, 16)), lane=SHADOW)
    form = submit(queue, steps.images(*range(6)), lane="bulk")  # a quarter is for singles
    await network.finish_all()
    assert all(answer.done() for answer in form)


@BOUNDED
@given(lanes=st.lists(st.sampled_from([*LANES, SHADOW]), min_size=1, max_size=40))
def test_every_copy_goes_after_all_that_waited_with_it(lanes: list[Lane]) -> None:
    async def run() -> list[int]:
        played = steps.SteppedQueues()
        for number, lane in enumerate(lanes):
            submit(played.queues[0], [steps.image(number)], lane=lane)
        await played.finish_all()
        return [number for batch in played.batches[0] for number in batch]

    ran = asyncio.run(run())
    assert sorted(ran) == list(range(len(lanes)))
    copies = [lanes[number] == SHADOW for number in ran]
    assert copies == sorted(copies)
