"""The room that messages take while they are received, on a loop whose clock jumps."""

import asyncio

import pytest

from app.environment import MIB
from app.errors import OverloadedError, SlowBodyError
from app.grpc.receiver import WAIT_AT_MOST_S, ReceiveRoom
from app.queueing.admission import SLOW_AFTER_S, SLOW_S_PER_MIB
from tests.support.virtual_loop import run_virtually


class Received:
    """What became of each message, and when."""

    def __init__(self, limit: int = 100) -> None:
        self.room = ReceiveRoom(limit)
        self.ended: dict[str, tuple[str, float]] = {}

    async def one(self, name: str, num_bytes: int, takes_s: float) -> None:
        fate = "received"
        try:
            async with self.room.taken(num_bytes):
                await asyncio.sleep(takes_s)
        except (OverloadedError, SlowBodyError) as error:
            fate = error.code
        self.ended[name] = (fate, asyncio.get_running_loop().time())

    async def together(self, **messages: tuple[int, float]) -> dict[str, tuple[str, float]]:
        """Begin them in order; a number of bytes, and how long they take to come."""
        async with asyncio.TaskGroup() as group:
            for name, (num_bytes, takes_s) in messages.items():
                group.create_task(self.one(name, num_bytes, takes_s))
        return self.ended


def test_what_has_room_waits_for_nobody():
    ended = run_virtually(Received().together(a=(50, 1.5), b=(50, 1.5)))
    assert ended == {"a": ("received", 1.5), "b": ("received", 1.5)}


def test_what_has_none_waits_and_the_first_is_the_first():
    ended = run_virtually(Received().together(a=(60, 0.5), b=(60, 0.5), c=(10, 0.5)))
    # The last would have had room at once, but a large one must not wait for ever.
    assert ended == {"a": ("received", 0.5), "b": ("received", 1.0), "c": ("received", 1.0)}


def test_a_slow_one_is_cut_for_one_that_waits():
    ended = run_virtually(Received().together(a=(60, 60.0), b=(60, 0.25)))
    assert ended["a"] == ("slow_body", SLOW_AFTER_S)
    assert ended["b"] == ("received", SLOW_AFTER_S + 0.25)


def test_a_slow_one_that_nobody_waits_for_is_let():
    ended = run_virtually(Received().together(a=(60, 60.0), b=(40, 60.0)))
    assert ended == {"a": ("received", 60.0), "b": ("received", 60.0)}


def test_a_longer_message_has_more_time():
    size = 6 * MIB
    ended = run_virtually(Received(size).together(a=(size, 60.0), b=(size, 0.0)))
    assert ended["a"] == ("slow_body", 6 * SLOW_S_PER_MIB)


def test_the_slowest_is_cut_and_no_more_than_it_takes():
    ended = run_virtually(Received().together(a=(50, 60.0), b=(50, 1.25), c=(50, 0.0)))
    assert ended["a"] == ("slow_body", SLOW_AFTER_S)
    assert (ended["b"], ended["c"]) == (("received", 1.25), ("received", SLOW_AFTER_S))


def test_nobody_waits_longer_than_haproxy_would():
    size = 40 * MIB  # its holder may take 10 s
    ended = run_virtually(Received(size).together(a=(size, 9.0), b=(10, 0.0), c=(10, 0.0)))
    assert ended["a"] == ("received", 9.0)
    assert ended["b"] == ended["c"] == ("overloaded", WAIT_AT_MOST_S)


def test_one_that_is_larger_than_the_room_is_received_alone():
    ended = run_virtually(Received().together(a=(500, 0.5), b=(500, 0.5)))
    assert ended == {"a": ("received", 0.5), "b": ("received", 1.0)}


@pytest.mark.parametrize("after_s", [0.0, 0.5, SLOW_AFTER_S, 1.5, WAIT_AT_MOST_S])
def test_whoever_goes_leaves_its_room_behind(after_s):
    """Cancelled as a receiver, as one who waits, in the moment of a cut and of its own time."""
    received = Received()

    async def hang_up() -> None:
        tasks = [asyncio.create_task(received.one(name, 60, 60.0)) for name in "abc"]
        await asyncio.sleep(after_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await received.one("last", 100, 0.0)

    run_virtually(hang_up())
    assert received.ended["last"][0] == "received"
    assert received.room.num_taken == 0
