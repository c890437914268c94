"""Between queues: nobody's load keeps the images of others waiting, whatever it is."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.queueing.batch_queue import BatchQueue
from app.queueing.priority import BULK_EVERY, Lane
from app.queueing.scheduler import BatchScheduler
from tests.support.queued_images import submit
from tests.support.steps import SteppedNetwork, image, settle

SIZES = (1, 2, 4)
MOST = SIZES[-1]


@dataclass
class Played:
    """Queues with one scheduler, on networks whose batches end one by one, in order."""

    num_queues: int
    num_places: int
    num_ahead: int
    networks: list[SteppedNetwork] = field(init=False)
    queues: list[BatchQueue] = field(init=False)
    taken: list[int] = field(default_factory=list)  # the queue of each batch, in order
    _num_ended: int = 0

    def __post_init__(self) -> None:
        self.networks = [SteppedNetwork(max_running=99) for _ in range(self.num_queues)]
        turns = BatchScheduler(self.num_places, num_ahead=self.num_ahead)
        self.queues = [
            BatchQueue(self.runs(which), SIZES, 10_000, self.networks[0].clock, turns)
            for which in range(self.num_queues)
        ]

    def runs(self, which: int):
        async def run(images):
            self.taken.append(which)
            return await self.networks[which].run(images)

        return run

    @property
    def now(self) -> float:
        return self.networks[0].now

    def tick(self) -> None:
        """Let time pass, so that what comes next is younger."""
        self.networks[0].now += 1.0

    async def drain(self) -> None:
        """Run all that waits."""
        while any(network.is_running for network in self.networks):
            await self.end_one()

    async def end_one(self) -> None:
        """End the batch that was taken first of those that run."""
        if self._num_ended < len(self.taken):
            self.networks[self.taken[self._num_ended]].finish()
            self._num_ended += 1
        await settle()


@settings(max_examples=150, deadline=None, database=None)
@given(
    num_places=st.integers(1, 3),
    num_ahead=st.integers(0, 2),
    others=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=12),
    own=st.integers(1, 3),
    lane=st.sampled_from(["interactive", "bulk"]),
)
def test_an_image_waits_for_what_was_ahead_and_two_batches_of_each_other_queue(
    num_places: int, num_ahead: int, others: list[tuple[int, int]], own: int, lane: Lane
) -> None:
    """However much comes after it, also for its own queue."""

    async def play() -> None:
        played = Played(3, num_places, num_ahead)
        for which, count in others:
            submit(played.queues[which], [image(0)] * count, lane=lane)
        played.tick()
        await settle()
        ahead = sum(map(len, played.queues)) + sum(n.num_running for n in played.networks) * MOST
        futures = submit(played.queues[0], [image(1)] * own)
        taken_before = len(played.taken)
        while not all(future.done() for future in futures):
            played.tick()
            for queue in played.queues:  # a flood, of which everything is younger
                submit(queue, [image(2)] * MOST)
            await settle()
            await played.end_one()
            batches = len(played.taken) - taken_before
            # A batch of others may be as small as one image: what is ahead counts each by itself.
            most = ahead + own + 2 * len(played.queues) + num_places + num_ahead
            assert batches <= most + most // (BULK_EVERY - 1) + 1
        await played.drain()

    asyncio.run(play())


@pytest.mark.parametrize("num_ahead", [0, 2])
async def test_one_members_load_does_not_take_the_ensemble_from_everybody(num_ahead: int) -> None:
    """Its queue always has whole batches, taken ahead; a photo for the other waits for a few."""
    played = Played(2, num_places=2, num_ahead=num_ahead)
    submit(played.queues[0], [image(0)] * 40)
    await settle()
    played.tick()
    (photo,) = submit(played.queues[1], [image(1)])
    num_batches = 0
    while not photo.done():
        played.tick()
        submit(played.queues[0], [image(2)] * MOST)
        await settle()
        await played.end_one()
        num_batches += 1
        assert num_batches <= 40 // MOST + 4 + num_ahead
    assert not photo.cancelled()
    await played.drain()


async def test_a_form_for_one_member_does_not_keep_a_photo_for_another_waiting() -> None:
    played = Played(2, num_places=1, num_ahead=0)
    submit(played.queues[0], [image(0)] * 64, lane="bulk")
    await settle()
    played.tick()
    (photo,) = submit(played.queues[1], [image(1)])
    await settle()
    await played.end_one()
    assert played.taken == [0, 1], "the form's first batch ran already"
    await played.end_one()
    assert photo.done()
    await played.drain()


async def test_of_eight_turns_one_is_for_bulk_images_of_any_queue() -> None:
    played = Played(2, num_places=1, num_ahead=0)
    submit(played.queues[0], [image(0)] * 200)
    await settle()
    submit(played.queues[1], [image(1)] * 8, lane="bulk")
    for _ in range(2 * BULK_EVERY + 2):
        await played.end_one()
    assert played.taken.count(1) == 2
    await played.drain()
