"""Weighted shares: of the cores' time while several sets wait, and nothing saved up before."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from app.queueing.batch_queue import BatchQueue
from app.queueing.scheduler import BatchScheduler, CoreShare, VirtualClock
from models.ensemble import Probabilities
from models.network import Pixels
from tests.support.queued_images import submit
from tests.support.steps import SteppedNetwork, image, settle
from tests.support.virtual_loop import virtually

TAKES_S = {"dear": 3.0, "cheap": 1.0}  # a batch of each set


class Played:
    """Two sets on one core: batches end one by one, each after its set's time."""

    def __init__(self, weights: dict[str, float] | None, num_places: int = 1) -> None:
        turns = BatchScheduler(num_places)
        self.clock = SteppedNetwork()
        self.networks = {name: SteppedNetwork(max_running=num_places) for name in TAKES_S}
        self.running: list[str] = []
        self.used_s = dict.fromkeys(TAKES_S, 0.0)
        self.queues = {
            name: BatchQueue(
                self.runs(name),
                (1, 4),
                10_000,
                self.clock.clock,
                turns,
                share=CoreShare(weights[name]) if weights else None,
            )
            for name in TAKES_S
        }

    def runs(self, name: str):
        async def run(images: Sequence[Pixels]) -> Probabilities:
            self.running.append(name)
            return await self.networks[name].run(images)

        return run

    async def end_batch(self) -> None:
        name = self.running.pop(0)
        self.clock.now += TAKES_S[name]
        self.used_s[name] += TAKES_S[name]
        self.networks[name].finish()
        await settle()

    async def drain(self) -> None:
        while self.running:
            await self.end_batch()

    async def flood(self, *names: str, images: int = 2000) -> None:
        for name in names:
            submit(self.queues[name], [image(0)] * images)
        await settle()


async def played(weights: dict[str, float] | None, batches: int = 300) -> Played:
    sets = Played(weights)
    await sets.flood("dear", "cheap")
    for _ in range(batches):
        await sets.end_batch()
    return sets


@pytest.mark.parametrize("weight", [1.0, 2.0, 5.0])
async def test_the_time_of_the_cores_is_shared_by_weight_while_both_wait(weight: float) -> None:
    """Whatever a batch of each costs: time is shared, not batches."""
    sets = await played({"dear": 1.0, "cheap": weight})
    used = dict(sets.used_s)
    await sets.drain()
    assert used["cheap"] / used["dear"] == pytest.approx(weight, rel=0.1)


async def test_without_weights_age_alone_counts() -> None:
    sets = Played(None)
    submit(sets.queues["dear"], [image(0)] * 40)
    await settle()
    sets.clock.now += 1
    await sets.flood("cheap", images=40)
    order = []
    while sets.running:
        order += sets.running
        await sets.end_batch()
    assert order == ["dear"] * 10 + ["cheap"] * 10


async def test_a_set_that_nobody_asked_has_saved_no_turns() -> None:
    sets = Played({"dear": 1.0, "cheap": 1.0})
    await sets.flood("dear")
    for _ in range(100):
        await sets.end_batch()
    await sets.flood("cheap")
    before = dict(sets.used_s)
    for _ in range(200):
        await sets.end_batch()
    own = {name: sets.used_s[name] - before.get(name, 0.0) for name in TAKES_S}
    await sets.drain()
    assert own["cheap"] / own["dear"] == pytest.approx(1, rel=0.1)


async def test_one_image_does_not_wait_for_the_backlog_of_a_heavier_set() -> None:
    sets = Played({"dear": 100.0, "cheap": 1.0})
    await sets.flood("dear")
    for _ in range(50):
        await sets.end_batch()
    (alone,) = submit(sets.queues["cheap"], [image(1)])
    await settle()
    for _ in range(2):  # the one that runs, and its own
        await sets.end_batch()
    assert alone.done()
    await sets.drain()


async def test_interactive_images_go_before_bulk_ones_whatever_the_weights() -> None:
    sets = Played({"dear": 1.0, "cheap": 100.0})
    submit(sets.queues["cheap"], [image(0)] * 40, lane="bulk")
    await settle()
    submit(sets.queues["dear"], [image(1)])
    await settle()
    await sets.end_batch()
    assert sets.running == ["dear"]
    await sets.drain()


async def test_runs_of_single_images_after_a_failed_batch_are_charged_too() -> None:
    """Five runs a turn: a failed batch, and each of its images. All but one were free once."""
    sets = Played({"dear": 1.0, "cheap": 1.0})
    sets.networks["dear"].bad = {7}
    submit(sets.queues["dear"], [image(7), *[image(0)] * 3] * 500)
    await sets.flood("cheap")
    while sum(sets.used_s.values()) < 600:
        await sets.end_batch()
    assert sets.used_s["dear"] / sets.used_s["cheap"] == pytest.approx(1, rel=0.1)
    await sets.drain()


@virtually
async def test_a_set_whose_batches_fail_pays_for_them_too() -> None:
    """Were they free, all turns would be its own."""
    turns, begun = BatchScheduler(), Counter[str]()
    clock = asyncio.get_running_loop().time

    def queue(name: str, error: Exception | None) -> BatchQueue:
        async def run(images: Sequence[Pixels]) -> Probabilities:
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


def test_a_share_moves_by_seconds_over_weight() -> None:
    clock, heavy, light = VirtualClock(), CoreShare(4.0), CoreShare()
    clock.taken(heavy, 2.0)
    clock.taken(light, 2.0)
    assert (heavy.ends, light.ends) == (0.5, 2.0)
    assert (clock.begins(heavy), clock.begins(light), clock.begins(None)) == (0.5, 2.0, 0.0)
    clock.taken(heavy, 8.0)
    assert heavy.ends == 2.5
    assert clock.begins(CoreShare()) == 0.5  # where the others are


def test_a_share_owes_nothing_after_an_idle_time() -> None:
    clock, light, heavy = VirtualClock(), CoreShare(0.01), CoreShare(4.0)
    clock.taken(light, 1.0)
    clock.taken(heavy, 1.0)
    assert clock.begins(light) == 100.0
    clock.idle()
    assert clock.begins(heavy) == clock.begins(light) == 100.0
    clock.taken(heavy, 1.0)
    assert clock.begins(light) == 100.0


async def test_a_light_set_pays_nothing_for_a_busy_period_that_is_over() -> None:
    sets = Played({"dear": 1.0, "cheap": 0.001})
    for _ in range(2):  # of the first batch nobody knew how long it would take
        await sets.flood("cheap", images=4)
        await sets.drain()
    sets.clock.now += 3600
    await sets.flood("dear", "cheap")
    before = dict(sets.used_s)
    for _ in range(3):
        await sets.end_batch()
    assert sets.used_s["cheap"] > before["cheap"]
    await sets.drain()
