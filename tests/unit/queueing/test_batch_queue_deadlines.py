"""Images with a deadline in the batch queue: dropped when it is over, refused if it will be."""

import math

import pytest

from app.errors import DeadlineError
from app.queueing.batch_queue import BatchQueue
from tests.support.queued_images import submit
from tests.support.steps import SteppedNetwork, image, make_queue, number_of, settle


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
