"""The batch size for a backlog: prepared once, used while enough images wait."""

import asyncio

import pytest

from app.queueing.backlog_size import BacklogSize
from app.queueing.batch_queue import ALONE_S, BatchQueue
from tests.support.queued_images import submit
from tests.support.steps import SteppedNetwork, image, number_of, settle

USUAL, LARGE, ENOUGH = 4, 8, 16


class Compiler:
    """What prepares, when it is let, and tells how often it was asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_prepared = 0
        self.may_end = asyncio.Event()
        self._error = error

    async def prepare(self) -> None:
        self.num_prepared += 1
        await self.may_end.wait()
        if self._error:
            raise self._error


def queue_of(network: SteppedNetwork, compiler: Compiler) -> BatchQueue:
    backlog = BacklogSize("one", USUAL, 1, compiler.prepare)
    return BatchQueue(network.run, (1, USUAL), 4096, network.clock, backlog=backlog)


async def worked_off(network: SteppedNetwork, queue: BatchQueue, num: int) -> list[int]:
    """Submit so many images, run them all, and return the sizes of their batches."""
    first = len(network.batches)
    futures = submit(queue, [image(number) for number in range(num)])
    await settle()
    await network.finish_all()
    assert [number_of(await future) for future in futures] == list(range(num))
    return [len(batch) for batch in network.batches[first:]]


async def prepared(network: SteppedNetwork, queue: BatchQueue, compiler: Compiler) -> None:
    compiler.may_end.set()
    assert set(await worked_off(network, queue, ENOUGH)) == {USUAL}
    await settle()
    assert compiler.num_prepared == 1


async def test_without_a_backlog_nothing_is_prepared():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    for _ in range(3):
        assert await worked_off(network, queue, ENOUGH - 1) == [4, 4, 4, 1, 1, 1]
    assert compiler.num_prepared == 0


async def test_the_usual_size_goes_on_while_it_is_prepared():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    for _ in range(3):
        assert await worked_off(network, queue, 2 * ENOUGH) == [USUAL] * 8
    assert compiler.num_prepared == 1


async def test_when_it_is_prepared_a_backlog_has_it():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    await prepared(network, queue, compiler)
    assert await worked_off(network, queue, 2 * ENOUGH) == [8, 8, 8, 4, 4]
    assert await worked_off(network, queue, ENOUGH - 1) == [4, 4, 4, 1, 1, 1]
    assert compiler.num_prepared == 1


async def test_every_place_must_find_a_batch():
    compiler = Compiler()
    backlog = BacklogSize("one", USUAL, 6, compiler.prepare)
    backlog.waited(6 * LARGE - 1)
    await settle()
    assert compiler.num_prepared == 0
    backlog.waited(6 * LARGE)
    compiler.may_end.set()
    await settle()
    assert backlog.is_due(6 * LARGE)
    assert not backlog.is_due(6 * LARGE - 1)


@pytest.mark.parametrize("error", [MemoryError("none is left"), RuntimeError("OpenVINO")])
async def test_one_that_cannot_be_prepared_is_not_asked_for_again(error, caplog):
    network, compiler = SteppedNetwork(), Compiler(error)
    queue = queue_of(network, compiler)
    await prepared(network, queue, compiler)
    assert set(await worked_off(network, queue, 4 * ENOUGH)) == {USUAL}
    assert compiler.num_prepared == 1
    assert f"one: cannot prepare batches of 8: {error}" in caplog.text


async def test_a_smaller_limit_of_batches_is_kept():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    await prepared(network, queue, compiler)
    queue.max_batch_size = 1
    assert set(await worked_off(network, queue, 2 * ENOUGH)) == {1}


async def test_a_large_batch_that_fails_is_run_one_by_one():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    await prepared(network, queue, compiler)
    network.bad = {3}
    futures = submit(queue, [image(number) for number in range(ENOUGH)])
    await settle()
    await network.finish_all()
    assert [len(batch) for batch in network.batches[4:]] == [8, *[1] * 8, 4, 4]
    assert [number_of(await f) for f in futures[:3]] == [0, 1, 2]
    with pytest.raises(ValueError, match="cannot run"):
        await futures[3]


async def test_bulk_images_are_no_backlog_while_others_come():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    await prepared(network, queue, compiler)
    num = 2 * ENOUGH

    async def sizes(num_others: int) -> set[int]:
        first = len(network.batches)
        submit(queue, [image(number) for number in range(num)], lane="bulk")
        if num_others:
            submit(queue, [image(number) for number in range(num_others)])
        await settle()
        await network.finish_all()
        return set(map(len, network.batches[first:]))

    network.now += ALONE_S - 0.01  # others came just now, for the preparation
    assert await sizes(0) == {USUAL}
    network.now += 0.02
    assert LARGE in await sizes(0)
    assert await sizes(1) == {USUAL, 1}
    assert LARGE in await sizes(ENOUGH + USUAL)  # those are a backlog themselves


async def test_bulk_images_beside_others_prepare_nothing():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    submit(queue, [image(0)])
    submit(queue, [image(number) for number in range(2 * ENOUGH)], lane="bulk")
    await settle()
    await network.finish_all()
    assert compiler.num_prepared == 0
    network.now += ALONE_S
    submit(queue, [image(number) for number in range(2 * ENOUGH)], lane="bulk")
    await settle()
    await network.finish_all()
    assert compiler.num_prepared == 1


async def test_where_a_larger_batch_is_near_none_is_taken_ahead():
    network, compiler = SteppedNetwork(), Compiler()
    queue = queue_of(network, compiler)
    submit(queue, [image(0)])
    await settle()
    for num_waiting, is_whole in ((USUAL - 1, False), (USUAL, True), (2 * USUAL, False)):
        submit(queue, [image(n) for n in range(num_waiting - len(queue))])
        assert queue.has_whole_batch is is_whole
    await network.finish_all()
