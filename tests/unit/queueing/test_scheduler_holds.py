"""The batch scheduler beside decoding: a batch that would grow waits while no core stands still."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.queueing import scheduler
from app.queueing.batch_queue import BatchQueue
from app.queueing.scheduler import BatchScheduler
from tests.support.decoding import Decoding
from tests.support.queued_images import submit
from tests.support.steps import SteppedNetwork, image, number_of, settle
from tests.support.virtual_loop import virtually

SIZES = (1, 3, 8)


class Cores:
    """Two of them, decoding, and a queue for each network."""

    def __init__(self, num_networks: int = 1, num_cores: int = 2) -> None:
        self.scheduler, self.decoding = BatchScheduler(num_cores), Decoding()
        self.scheduler.share_cores_with(self.decoding)
        self.networks = [SteppedNetwork(max_running=4) for _ in range(num_networks)]
        self.queues = [
            BatchQueue(network.run, SIZES, 1000, network.clock, self.scheduler)
            for network in self.networks
        ]

    @property
    def batches(self) -> list[list[int]]:
        """How large each network's batches were."""
        return [[len(batch) for batch in network.batches] for network in self.networks]

    async def submit(
        self, which: int, num: int, timeout_s: float = math.inf
    ) -> Sequence[asyncio.Future]:
        futures = submit(self.queues[which], [image(n) for n in range(num)], timeout_s)
        await settle()
        return futures


@pytest.fixture(autouse=True)
def no_hold_ends_by_itself(monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_HOLD_S", 3600.0)


async def test_a_batch_waits_for_images_that_are_being_decoded_on_all_cores():
    cores = Cores()
    cores.decoding.num_coming = 5
    futures = [*await cores.submit(0, 4)]
    assert cores.batches == [[]]
    for _ in range(4):
        futures += await cores.submit(0, 1)
        cores.decoding.end()
        await settle()
    assert cores.batches == [[8]]
    await cores.networks[0].finish_all()
    assert all(future.done() for future in futures)


async def test_it_does_not_wait_while_a_core_has_nothing_to_do():
    cores = Cores()
    cores.decoding.num_coming = 1  # on one of two cores
    await cores.submit(0, 1)
    assert cores.batches == [[1]]
    cores.decoding.num_coming = 2  # now the batch and a file are on both
    await cores.submit(0, 1)
    assert cores.batches == [[1]]
    await cores.networks[0].finish_all()


async def test_it_does_not_wait_for_fewer_than_would_make_it_larger():
    cores = Cores()
    cores.decoding.num_coming = 4
    await cores.submit(0, 3)
    assert cores.batches == [[3]]  # with 7 it would be 3 too
    await cores.networks[0].finish_all()


async def test_it_goes_when_those_it_waited_for_do_not_come():
    cores = Cores()
    cores.decoding.num_coming = 7
    await cores.submit(0, 2)
    assert cores.batches == [[]]
    cores.decoding.end(6)  # damaged, or their callers went away
    await settle()
    assert cores.batches == [[1, 1]]
    await cores.networks[0].finish_all()


async def test_a_full_batch_of_another_queue_passes_one_that_waits():
    cores = Cores(num_networks=2)
    cores.decoding.num_coming = 6
    await cores.submit(0, 2)
    cores.networks[1].now = 1.0  # it came later
    await cores.submit(1, 8)
    assert cores.batches == [[], [8]]
    for network in cores.networks:
        await network.finish_all()


async def test_the_shadow_lane_does_not_pass_a_batch_that_waits_for_more():
    cores = Cores(num_networks=2)
    cores.decoding.num_coming = 4
    await cores.submit(0, 4)
    submit(cores.queues[1], [image(9)], lane="shadow")
    await settle()
    assert cores.batches == [[], []]
    cores.decoding.end(4)
    await settle()
    assert cores.batches[0] == [3, 1]
    for network in cores.networks:
        await network.finish_all()
    await settle()
    assert cores.batches[1] == [1]
    await cores.networks[1].finish_all()


@virtually
async def test_full_batches_of_another_queue_do_not_make_it_wait_again(monkeypatch):
    """A cascade's second member has few images, while the first has more than enough."""
    monkeypatch.setattr(scheduler, "MAX_HOLD_S", 0.01)
    cores = Cores(num_networks=2)
    cores.decoding.num_coming = 9
    (unsure,) = await cores.submit(1, 1)
    while not cores.batches[1]:
        await cores.submit(0, 8)
        await asyncio.sleep(0.004)
        assert len(cores.batches[0]) < 4, "it waited for more than 0.012 s"
        cores.networks[0].finish()
    await cores.networks[1].finish_all()
    assert unsure.done()
    await cores.networks[0].finish_all()


@virtually
async def test_it_never_waits_for_long(monkeypatch):
    """A file whose decoding hangs, or takes for ever, holds nobody up."""
    monkeypatch.setattr(scheduler, "MAX_HOLD_S", 0.01)
    cores = Cores(num_cores=1)
    cores.decoding.num_coming = 9
    for num_batches in (1, 2):  # the second waits again, and again for so long
        await cores.submit(0, 1)
        await asyncio.sleep(0.009)
        assert len(cores.batches[0]) == num_batches - 1
        await asyncio.sleep(0.002)
        assert len(cores.batches[0]) == num_batches
        await cores.networks[0].finish_all()


async def test_an_image_whose_time_would_pass_meanwhile_does_not_wait(monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_HOLD_S", 1.0)
    cores = Cores()
    cores.decoding.num_coming = 9
    await cores.submit(0, 1, timeout_s=1.5)
    assert cores.batches == [[]]
    await cores.submit(0, 1, timeout_s=0.9)  # it came later, and there is only one batch of both
    cores.networks[0].now = 0.7
    cores.decoding.end()
    await settle()
    assert cores.batches == [[1, 1]]
    await cores.networks[0].finish_all()


async def test_nor_does_one_that_has_more_time_than_an_image_behind_it(monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_HOLD_S", 1.0)
    cores = Cores()
    cores.decoding.num_coming = 9
    await cores.submit(0, 1)
    assert cores.batches == [[]]
    await cores.submit(0, 1, timeout_s=0.9)
    assert cores.batches == [[1, 1]]
    await cores.networks[0].finish_all()


async def test_what_waits_next_waits_as_long_as_if_none_had_waited_before():
    """A hold ends with the images it was for, and leaves no time that runs."""
    cores = Cores(num_cores=1)
    cores.decoding.num_coming = 9
    (future,) = await cores.submit(0, 1)
    assert cores.scheduler._hold is not None
    future.cancel()
    cores.queues[0].images.forget_the_gone()
    cores.decoding.end()
    await settle()
    assert cores.scheduler._hold is None
    assert cores.batches == [[]]


async def test_a_batch_that_keeps_two_cores_busy_counts_for_two():
    turns, decoding = BatchScheduler(2, threads_each=2), Decoding()
    turns.share_cores_with(decoding)
    network = SteppedNetwork(max_running=2)
    queue = BatchQueue(network.run, SIZES, 100, network.clock, turns)
    decoding.num_coming = 2
    submit(queue, [image(0)])
    await settle()
    assert len(network.batches) == 1  # two of four cores were free
    submit(queue, [image(1)])
    await settle()
    assert len(network.batches) == 1
    await network.finish_all()


@settings(max_examples=100, deadline=None, database=None)
@given(
    num_cores=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40),
)
def test_no_core_is_free_while_an_image_waits(num_cores: int, steps: list[tuple[int, int]]):
    async def play() -> None:
        cores = Cores(num_networks=2, num_cores=num_cores)
        futures: list[asyncio.Future[Any]] = []
        for what, count in steps:
            if what == 2:
                cores.decoding.num_coming += count
            elif count:  # of what is decoded, some have an image and some none
                cores.decoding.end(min(count, cores.decoding.num_coming))
                futures += await cores.submit(what, count)
            elif cores.networks[what].is_running:
                cores.networks[what].finish()
            await settle()
            running = sum(network.num_running for network in cores.networks)
            decoding = cores.decoding.num_busy
            assert running <= num_cores
            is_waiting = any(len(queue) for queue in cores.queues)
            assert running + decoding >= num_cores or not is_waiting
        cores.decoding.end(cores.decoding.num_coming)
        for _ in range(len(futures)):
            for network in cores.networks:
                await network.finish_all()
        assert all(number_of(future.result()) >= 0 for future in futures)

    asyncio.run(play())
