"""Whatever callers, clock and network do: what the batch queue promises."""

import asyncio
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import DeadlineError, OverloadedError
from app.queueing.batch_queue import BatchQueue
from app.queueing.batch_records import BatchResult
from app.setting_values import form_places
from tests.support.queued_images import submit
from tests.support.steps import SteppedNetwork, image, number_of, settle

BOUNDED = settings(max_examples=250, deadline=None, database=None)
TIMEOUTS = st.sampled_from([0.5, 1.0, 2.0, math.inf])
STEP = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 5), TIMEOUTS),
    st.tuples(st.just("cancel"), st.integers(0, 40)),
    st.tuples(st.just("wait"), st.sampled_from([0.25, 1.0, 3.0])),
    st.tuples(st.just("finish")),
    st.tuples(st.just("settle")),
)


@dataclass
class Submitted:
    number: int
    expires: float
    future: asyncio.Future[BatchResult]


class Script:
    """Plays steps on a queue and remembers what was asked of it."""

    def __init__(self, max_batch_size: int, max_queued: int, bad: set[int]) -> None:
        self.network = SteppedNetwork(bad)
        self.max_queued = max_queued
        self.queue = BatchQueue(
            self.network.run, range(1, max_batch_size + 1), max_queued, self.network.clock
        )
        self.submitted: list[Submitted] = []

    async def play(self, steps: list[tuple]) -> None:
        for name, *values in steps:
            getattr(self, name)(*values)
            if name != "submit":  # several submissions may come within one turn of the loop
                await settle()
                assert self.network.is_running or len(self.queue) == 0, "work waits, network idle"
        await self.network.finish_all()

    def submit(self, count: int, timeout_s: float) -> None:
        first, before = len(self.submitted), len(self.queue)
        numbers = range(first, first + count)
        try:
            futures = submit(self.queue, [image(n) for n in numbers], timeout_s)
        except OverloadedError:
            assert len(self.queue) <= before  # less by those that went away
            places = self.max_queued if count == 1 else form_places(self.max_queued)
            assert len(self.queue) + count > places
            return
        except DeadlineError:
            assert before > 2 * self.queue.max_batch_size
            assert timeout_s < math.inf
            return
        expires = self.network.now + timeout_s
        self.submitted += [Submitted(n, expires, f) for n, f in zip(numbers, futures, strict=True)]

    def cancel(self, which: int) -> None:
        if which < len(self.submitted):
            self.submitted[which].future.cancel()

    def wait(self, seconds: float) -> None:
        self.network.now += seconds

    def finish(self) -> None:
        if self.network.is_running:
            self.network.finish()

    def settle(self) -> None:
        """Only let the loop turn."""


@BOUNDED
@given(
    steps=st.lists(STEP, max_size=40),
    max_batch_size=st.integers(1, 4),
    max_queued=st.integers(1, 12),
    bad=st.sets(st.integers(0, 40), max_size=3),
)
def test_everyone_is_answered_once_and_rightly(steps, max_batch_size, max_queued, bad):
    async def play() -> Script:
        script = Script(max_batch_size, max_queued, bad)
        await script.play(steps)
        return script

    script = asyncio.run(play())
    batches = script.network.batches
    assert all(1 <= len(batch) <= max_batch_size for batch in batches)
    ran = [number for batch in batches for number in batch]
    first_runs = list(dict.fromkeys(ran))
    assert first_runs == sorted(first_runs)  # oldest first
    for one in script.submitted:
        check_outcome(one, ran.count(one.number), one.number in bad, bool(bad), script)


def check_outcome(
    one: Submitted, times_run: int, is_bad: bool, may_run_twice: bool, script: Script
) -> None:
    assert one.future.done(), f"{one.number} was lost"
    assert times_run <= (2 if may_run_twice else 1)
    if one.future.cancelled():
        return
    error = one.future.exception()
    if isinstance(error, DeadlineError):
        assert times_run == 0
        assert one.expires - script.network.longest_s <= script.network.now
    elif error is not None:
        assert is_bad
    else:
        assert not is_bad
        assert number_of(one.future.result()) == one.number


@BOUNDED
@given(count=st.integers(1, 30), max_batch_size=st.integers(1, 8))
def test_no_batch_is_smaller_than_what_waits(count, max_batch_size):
    async def play() -> list[int]:
        network = SteppedNetwork()
        submit(
            BatchQueue(network.run, range(1, max_batch_size + 1), 64, network.clock),
            [image(n) for n in range(count)],
        )
        await network.finish_all()
        return [len(batch) for batch in network.batches]

    sizes = asyncio.run(play())
    assert sizes[:-1] == [max_batch_size] * (len(sizes) - 1)
    assert sum(sizes) == count


@BOUNDED
@given(timeout_s=st.floats(allow_nan=True, allow_infinity=True))
def test_any_float_is_a_timeout_or_refused(timeout_s):
    async def ask() -> None:
        network = SteppedNetwork()
        queue = BatchQueue(network.run, range(1, 5), 4, network.clock)
        if timeout_s > 0:
            (future,) = submit(queue, [image(1)], timeout_s)
            await network.finish_all()
            assert number_of(future.result()) == 1
        else:
            with pytest.raises(DeadlineError):
                submit(queue, [image(1)], timeout_s)

    asyncio.run(ask())
