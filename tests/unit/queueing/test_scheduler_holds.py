"""The batch scheduler beside decoding: a batch that would grow waits while no core stands still."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.queueing import scheduler
from tests.support.steps import SteppedQueues, begin, number_of, settle
from tests.support.virtual_loop import virtually

SIZES = (1, 3, 8)


class Decoding:
    """A source whose images a test counts."""

    def __init__(self, num_threads: int = 2) -> None:
        self._num_threads, self.num_coming = num_threads, 0
        self._ended: Callable[[], None] = lambda: None

    @property
    def num_busy(self) -> int:
        return min(self.num_coming, self._num_threads)

    def on_decoded(self, call: Callable[[], None]) -> None:
        self._ended = call

    def end(self, num: int = 1) -> None:
        self.num_coming -= num
        self._ended()


class Cores(SteppedQueues):
    """Cores on which files are decoded too."""

    def __init__(self, num: int = 1, num_cores: int = 2, threads_each: int = 1) -> None:
        super().__init__(num, num_cores, sizes=SIZES, threads_each=threads_each)
        self.decoding = Decoding()
        self.scheduler.share_cores_with(self.decoding)

    async def end(self, num: int = 1) -> None:
        """End files that are decoded."""
        self.decoding.end(num)
        await settle()


@pytest.fixture(autouse=True)
def no_hold_ends_by_itself(monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_HOLD_S", 3600.0)


@pytest.fixture
def cores() -> Cores:
    return Cores()


async def test_a_batch_waits_for_images_that_are_being_decoded_on_all_cores(cores):
    cores.decoding.num_coming = 5
    futures = await begin(cores.queues[0], *range(4))
    assert cores.sizes == [[]]
    for _ in range(4):
        futures += await begin(cores.queues[0], 0)
        await cores.end()
    assert cores.sizes == [[8]]
    await cores.finish_all()
    assert all(future.done() for future in futures)


async def test_it_does_not_wait_while_a_core_has_nothing_to_do(cores):
    cores.decoding.num_coming = 1  # on one of two cores
    await begin(cores.queues[0], 0)
    assert cores.sizes == [[1]]
    cores.decoding.num_coming = 2  # now the batch and a file are on both
    await begin(cores.queues[0], 0)
    assert cores.sizes == [[1]]
    await cores.finish_all()


async def test_it_does_not_wait_for_fewer_than_would_make_it_larger(cores):
    cores.decoding.num_coming = 4
    await begin(cores.queues[0], *range(3))
    assert cores.sizes == [[3]]  # with 7 it would be 3 too
    await cores.finish_all()


async def test_it_goes_when_those_it_waited_for_do_not_come(cores):
    cores.decoding.num_coming = 7
    await begin(cores.queues[0], 0, 1)
    assert cores.sizes == [[]]
    await cores.end(6)  # damaged, or their callers went away
    assert cores.sizes == [[1, 1]]
    await cores.finish_all()


async def test_a_full_batch_of_another_queue_passes_one_that_waits():
    cores = Cores(2)
    cores.decoding.num_coming = 6
    await begin(cores.queues[0], 0, 1)
    cores.tick()  # the other came later
    await begin(cores.queues[1], *range(8))
    assert cores.sizes == [[], [8]]
    await cores.finish_all()


async def test_the_shadow_lane_does_not_pass_a_batch_that_waits_for_more():
    cores = Cores(2)
    cores.decoding.num_coming = 4
    await begin(cores.queues[0], *range(4))
    await begin(cores.queues[1], 9, lane="shadow")
    assert cores.sizes == [[], []]
    await cores.end(4)
    assert cores.sizes == [[3, 1], []]
    await cores.finish_all()
    assert cores.sizes == [[3, 1], [1]]


@virtually
async def test_full_batches_of_another_queue_do_not_make_it_wait_again(monkeypatch):
    """A cascade's second member has few images, while the first has more than enough."""
    monkeypatch.setattr(scheduler, "MAX_HOLD_S", 0.01)
    cores = Cores(2)
    cores.decoding.num_coming = 9
    (unsure,) = await begin(cores.queues[1], 0)
    while not cores.sizes[1]:
        await begin(cores.queues[0], *range(8))
        await asyncio.sleep(0.004)
        assert len(cores.sizes[0]) < 4, "it waited for more than 0.012 s"
        cores.networks[0].finish()
    await cores.networks[1].finish_all()
    assert unsure.done()
    await cores.finish_all()


@virtually
async def test_it_never_waits_for_long(monkeypatch):
    """A file whose decoding hangs, or takes for ever, holds nobody up."""
    monkeypatch.setattr(scheduler, "MAX_HOLD_S", 0.01)
    cores = Cores(num_cores=1)
    cores.decoding.num_coming = 9
    for num_batches in (1, 2):  # the second waits again, and again for so long
        await begin(cores.queues[0], 0)
        await asyncio.sleep(0.009)
        assert len(cores.sizes[0]) == num_batches - 1
        await asyncio.sleep(0.002)
        assert len(cores.sizes[0]) == num_batches
        await cores.finish_all()


async def test_an_image_whose_time_would_pass_meanwhile_does_not_wait(cores, monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_HOLD_S", 1.0)
    cores.decoding.num_coming = 9
    await begin(cores.queues[0], 0, timeout_s=1.5)
    assert cores.sizes == [[]]
    await begin(cores.queues[0], 0, timeout_s=0.9)  # it came later, and both are one batch
    cores.tick(0.7)
    await cores.end()
    assert cores.sizes == [[1, 1]]
    await cores.finish_all()


async def test_nor_does_one_that_has_more_time_than_an_image_behind_it(cores, monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_HOLD_S", 1.0)
    cores.decoding.num_coming = 9
    await begin(cores.queues[0], 0)
    assert cores.sizes == [[]]
    await begin(cores.queues[0], 0, timeout_s=0.9, lane="bulk")
    assert cores.sizes == [[1, 1]]
    await cores.finish_all()


async def test_what_waits_next_waits_as_long_as_if_none_had_waited_before():
    """A hold ends with the images it was for, and leaves no time that runs."""
    cores = Cores(num_cores=1)
    cores.decoding.num_coming = 9
    (future,) = await begin(cores.queues[0], 0)
    assert cores.scheduler._hold is not None
    future.cancel()
    cores.queues[0].images.forget_the_gone()
    await cores.end()
    assert cores.scheduler._hold is None
    assert cores.sizes == [[]]


async def test_a_batch_that_keeps_two_cores_busy_counts_for_two():
    cores = Cores(threads_each=2)
    cores.decoding.num_coming = 2
    await begin(cores.queues[0], 0)
    assert cores.sizes == [[1]]  # two of four cores were free
    await begin(cores.queues[0], 1)
    assert cores.sizes == [[1]]
    await cores.finish_all()


@settings(max_examples=100, deadline=None, database=None)
@given(
    num_cores=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40),
)
def test_no_core_is_free_while_an_image_waits(num_cores: int, steps: list[tuple[int, int]]):
    async def play() -> None:
        cores = Cores(2, num_cores)
        futures: list[asyncio.Future[Any]] = []
        for what, count in steps:
            if what == 2:
                cores.decoding.num_coming += count
            elif count:  # of what is decoded, some have an image and some none
                cores.decoding.end(min(count, cores.decoding.num_coming))
                futures += await begin(cores.queues[what], *range(count))
            elif cores.networks[what].is_running:
                cores.networks[what].finish()
            await settle()
            running = len(cores.running)
            assert running <= num_cores
            assert running + cores.decoding.num_busy >= num_cores or not cores.num_waiting
        cores.decoding.end(cores.decoding.num_coming)
        await cores.finish_all()
        assert all(number_of(future.result()) >= 0 for future in futures)

    asyncio.run(play())
