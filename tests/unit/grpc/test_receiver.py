"""Which messages are received at once, which wait for room, and which are refused."""

import asyncio

import pytest

from app.environment import MIB, serve_environment
from app.errors import BodyTooLargeError, ClientGoneError, OverloadedError, SlowBodyError
from app.grpc.interface import (
    SHORT_BYTES,
    SHORT_IS_SLOW_AFTER_S,
    SHORT_PLACES,
    SHORT_WITHIN_S,
    WAIT_AT_MOST_S,
    Receiver,
    ReceiveRoom,
    max_message_bytes,
)
from app.queueing.admission import SLOW_AFTER_S, SLOW_S_PER_MIB
from app.settings import Settings
from tests.support.cases import cases
from tests.support.grpc_contexts import stalled_stream, stream_of
from tests.support.virtual_loop import run_virtually

SETTINGS = Settings(max_body_bytes=4 * MIB, max_bytes_in_flight=16 * MIB, max_concurrent_requests=8)
SMALL, LARGE = MIB, 4 * MIB  # half of 16 MiB is for 8 such ones, the other for two of these
SLOW, CUT = ("slow_body", SLOW_AFTER_S), ("overloaded", WAIT_AT_MOST_S)
LONG, LONG_S = 6 * MIB, 6 * SLOW_S_PER_MIB
HELD_BYTES = 40 * MIB  # its holder may take 10 s


async def receive_beside_two(announced: int | None) -> float:
    """Receive a message that is there while two large ones take their room; tell when it was."""
    receiver, loop = Receiver(SETTINGS), asyncio.get_running_loop()
    large = [asyncio.create_task(receiver.receive(stalled_stream(), LARGE)) for _ in range(2)]
    await asyncio.sleep(0)
    assert await receiver.receive(stream_of(b"message"), announced) == b"message"
    for task in large:
        task.cancel()
    await asyncio.gather(*large, return_exceptions=True)
    return loop.time()


def test_small_messages_wait_for_nobody():
    assert run_virtually(receive_beside_two(SMALL)) == 0.0


@pytest.mark.parametrize("announced", [SMALL + 1, LARGE, None])
def test_large_ones_wait_for_each_other(announced):
    """And so does one that does not say what it is."""
    assert run_virtually(receive_beside_two(announced)) == SLOW_AFTER_S


async def test_what_is_too_long_or_of_a_client_that_hung_up_is_not_received():
    receiver = Receiver(SETTINGS)
    with pytest.raises(BodyTooLargeError, match=r"has 5242881 bytes, the limit is 4194304;"):
        await receiver.receive(stalled_stream(), 5 * MIB + 1)
    stream = stream_of()
    stream.cancel()
    with pytest.raises(ClientGoneError):
        await Receiver(SETTINGS).receive(stream, 10)


def test_a_messages_limit_fits_grpcs_option_and_serves_own_proxies(tmp_path):
    assert max_message_bytes(3 * 2**30) == 2**31 - 1
    environment = serve_environment(tmp_path, (1, 2))
    limit = max_message_bytes(Settings().max_body_bytes)
    assert environment["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] == str(limit)


@pytest.mark.parametrize("announced", [30, None])
def test_a_question_that_does_not_come_is_not_waited_for(announced):
    async def ended_at() -> float:
        with pytest.raises(SlowBodyError, match="send it in one piece"):
            await Receiver(SETTINGS).receive_short(stalled_stream(), announced)
        return asyncio.get_running_loop().time()

    assert run_virtually(ended_at()) == SHORT_WITHIN_S


@pytest.mark.parametrize("announced", [SHORT_BYTES + 1, None])
async def test_a_question_of_more_than_some_kib_is_refused(announced):
    stream = stream_of(bytes(SHORT_BYTES + 1))
    with pytest.raises(BodyTooLargeError, match="16385 bytes, the limit of this method is 16384"):
        await Receiver(SETTINGS).receive_short(stream, announced)


def test_questions_that_stall_give_way_to_those_that_come():
    """Each in its turn; the places are never more than they are."""

    async def scenario() -> list[str]:
        receiver = Receiver(SETTINGS)
        stalled = [
            asyncio.create_task(receiver.receive_short(stalled_stream(), 30))
            for _ in range(SHORT_PLACES)
        ]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="64 messages are awaited"):
            await receiver.receive_short(stream_of(b"question"), 30)
        await asyncio.sleep(SHORT_IS_SLOW_AFTER_S)
        assert await receiver.receive_short(stream_of(b"question"), 30) == b"question"
        await asyncio.wait(stalled, return_when=asyncio.FIRST_COMPLETED)
        assert [task.done() for task in stalled] == [True] + [False] * (SHORT_PLACES - 1)
        errors = await asyncio.gather(*stalled, return_exceptions=True)
        return [type(error).__name__ for error in errors]

    assert run_virtually(scenario()) == ["SlowBodyError"] * SHORT_PLACES


class Received:
    """What became of each message, and when."""

    def __init__(self, limit: int = 100) -> None:
        self.room = ReceiveRoom(limit)

    async def receive(self, num_bytes: int, takes_s: float) -> tuple[str, float]:
        fate = "received"
        try:
            async with self.room.taken(num_bytes):
                await asyncio.sleep(takes_s)
        except (OverloadedError, SlowBodyError) as error:
            fate = error.code
        return fate, asyncio.get_running_loop().time()

    async def together(self, *messages: tuple[int, float]) -> list[tuple[str, float]]:
        """Begin them in order; a number of bytes, and how long they take to come."""
        return await asyncio.gather(*(self.receive(*message) for message in messages))


def received(at_s: float) -> tuple[str, float]:
    return "received", at_s


@cases(
    "limit, messages, ended",
    # What has room waits for nobody; a slow message that nobody waits for is let.
    (100, [(50, 1.5), (50, 1.5)], [received(1.5), received(1.5)]),
    (100, [(60, 60.0), (40, 60.0)], [received(60.0), received(60.0)]),
    # The first is the first. The last would have room at once, but a large one must not wait
    # for ever.
    (100, [(60, 0.5), (60, 0.5), (10, 0.5)], [received(0.5), received(1.0), received(1.0)]),
    # The slowest is cut for those that wait, and no more than it takes.
    (100, [(60, 60.0), (60, 0.25)], [SLOW, received(SLOW_AFTER_S + 0.25)]),
    (100, [(50, 60.0), (50, 1.25), (50, 0.0)], [SLOW, received(1.25), received(SLOW_AFTER_S)]),
    # A longer message has more time; nobody waits longer than HAProxy would.
    (LONG, [(LONG, 60.0), (LONG, 0.0)], [("slow_body", LONG_S), received(LONG_S)]),
    (HELD_BYTES, [(HELD_BYTES, 9.0), (10, 0.0), (10, 0.0)], [received(9.0), CUT, CUT]),
    # A message that is larger than the room is received alone.
    (100, [(500, 0.5), (500, 0.5)], [received(0.5), received(1.0)]),
)
def test_who_has_room_and_when(limit, messages, ended):
    assert run_virtually(Received(limit).together(*messages)) == ended


@pytest.mark.parametrize("after_s", [0.0, 0.5, SLOW_AFTER_S, 1.5, WAIT_AT_MOST_S])
def test_whoever_goes_leaves_its_room_behind(after_s):
    """Cancelled as a receiver, as one who waits, in the moment of a cut and of its own time."""
    room = Received()

    async def hang_up() -> tuple[str, float]:
        tasks = [asyncio.create_task(room.receive(60, 60.0)) for _ in "abc"]
        await asyncio.sleep(after_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await room.receive(100, 0.0)

    assert run_virtually(hang_up())[0] == "received"
    assert room.room.num_taken == 0
