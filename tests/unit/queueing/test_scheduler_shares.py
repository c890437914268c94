"""Weighted shares: of the cores' time while several sets wait, and nothing saved up before."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from app.queueing.batch_queue import BatchQueue
from app.queueing.fairness import CoreShare
from app.queueing.scheduler import BatchScheduler
from tests.support.queued_images import submit
from tests.support.steps import SteppedQueues, begin, image, images
from tests.support.virtual_loop import virtually

TAKES_S = (3.0, 1.0)  # a batch of each set
DEAR, CHEAP = 0, 1


class Played(SteppedQueues):
    """Two sets on one core: batches end one by one, each after its set's time."""

    def __init__(self, *weights: float) -> None:
        shares = [CoreShare(weight) for weight in weights]
        super().__init__(2, sizes=(1, 4), shares=shares)
        self.used_s = [0.0, 0.0]

    async def end_first(self) -> None:
        which = self.running[0]
        self.tick(TAKES_S[which])
        self.used_s[which] += TAKES_S[which]
        await super().end_first()

    async def end(self, num: int) -> None:
        for _ in range(num):
            await self.end_first()

    async def flood(self, *sets: int, num: int = 2000) -> None:
        for which in sets:
            await begin(self.queues[which], *[0] * num)


@pytest.mark.parametrize("weight", [1.0, 2.0, 5.0])
async def test_the_time_of_the_cores_is_shared_by_weight_while_both_wait(weight: float) -> None:
    """Whatever a batch of each costs: time is shared, not batches."""
    sets = Played(1.0, weight)
    await sets.flood(DEAR, CHEAP)
    await sets.end(300)
    assert sets.used_s[CHEAP] / sets.used_s[DEAR] == pytest.approx(weight, rel=0.1)
    await sets.finish_all()


async def test_without_weights_age_alone_counts() -> None:
    sets = Played()
    await sets.flood(DEAR, num=40)
    sets.tick()
    await sets.flood(CHEAP, num=40)
    await sets.finish_all()
    assert sets.taken == [DEAR] * 10 + [CHEAP] * 10


async def test_a_set_that_nobody_asked_has_saved_no_turns() -> None:
    sets = Played(1.0, 1.0)
    await sets.flood(DEAR)
    await sets.end(100)
    await sets.flood(CHEAP)
    before_s = sets.used_s[DEAR]
    await sets.end(200)
    assert sets.used_s[CHEAP] / (sets.used_s[DEAR] - before_s) == pytest.approx(1, rel=0.1)
    await sets.finish_all()


async def test_one_image_does_not_wait_for_the_backlog_of_a_heavier_set() -> None:
    sets = Played(100.0, 1.0)
    await sets.flood(DEAR)
    await sets.end(50)
    (alone,) = await begin(sets.queues[CHEAP], 1)
    await sets.end(2)  # the one that runs, and its own
    assert alone.done()
    await sets.finish_all()


async def test_interactive_images_go_before_bulk_ones_whatever_the_weights() -> None:
    sets = Played(1.0, 100.0)
    await begin(sets.queues[CHEAP], *[0] * 40, lane="bulk")
    await begin(sets.queues[DEAR], 1)
    await sets.end_first()
    assert sets.running == [DEAR]
    await sets.finish_all()


async def test_runs_of_single_images_after_a_failed_batch_are_charged_too() -> None:
    """Five runs a turn: a failed batch, and each of its images. All but one were free once."""
    sets = Played(1.0, 1.0)
    sets.networks[DEAR].bad = {7}
    submit(sets.queues[DEAR], images(7, 0, 0, 0) * 500)
    await sets.flood(CHEAP)
    while sum(sets.used_s) < 600:
        await sets.end_first()
    assert sets.used_s[DEAR] / sets.used_s[CHEAP] == pytest.approx(1, rel=0.1)
    await sets.finish_all()


@virtually
async def test_a_set_whose_batches_fail_pays_for_them_too() -> None:
    """Were they free, all turns would be its own."""
    turns, begun = BatchScheduler(), Counter[str]()
    clock = asyncio.get_running_loop().time

    def queue(name: str, error: Exception | None) -> BatchQueue:
        async def run(images):
            begun[name] += 1
            await asyncio.sleep(1)
            if error is not None:
                raise error
            return np.zeros((len(images), 2), np.float32)

        return BatchQueue(run, (1,), 1000, clock, turns, share=CoreShare())

    queues = [queue("broken", RuntimeError("broken")), queue("healthy", None)]
    futures = [future for own in queues for future in submit(own, [image(0)] * 200)]
    await asyncio.sleep(100.5)
    assert begun == {"broken": pytest.approx(50, abs=3), "healthy": pytest.approx(50, abs=3)}
    await asyncio.gather(*futures, return_exceptions=True)


async def test_a_light_set_pays_nothing_for_a_busy_period_that_is_over() -> None:
    sets = Played(1.0, 0.001)
    for _ in range(2):  # of the first batch nobody knew how long it would take
        await sets.flood(CHEAP, num=4)
        await sets.finish_all()
    sets.tick(3600)
    await sets.flood(DEAR, CHEAP)
    before_s = sets.used_s[CHEAP]
    await sets.end(3)
    assert sets.used_s[CHEAP] > before_s
    await sets.finish_all()
