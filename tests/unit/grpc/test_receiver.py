"""Which messages are received at once, which wait, and which not at all."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from ray.serve.grpc_util import gRPCInputStream

from app.environment import MIB, serve_environment
from app.errors import BodyTooLargeError, ClientGoneError
from app.grpc.receiver import Receiver, max_message_bytes
from app.grpc.servicer import Message
from app.queueing.uploads import SLOW_AFTER_S
from app.settings import Settings
from tests.support.grpc_contexts import stream_of
from tests.support.virtual_loop import run_virtually

SETTINGS = Settings(max_body_bytes=4 * MIB, max_bytes_in_flight=16 * MIB, max_concurrent_requests=8)
SMALL, LARGE = MIB, 4 * MIB  # half of 16 MiB is for 8 such ones, the other for two of these


def never() -> gRPCInputStream[Message]:
    """The stream of a client that has nothing more to send."""

    async def iterate() -> AsyncIterator[Message]:
        await asyncio.Future()
        yield Message(b"")

    return gRPCInputStream(iterate())


async def receive_beside_two(announced: int | None) -> float:
    """Receive a message that is there while two large ones take their room; tell when it was."""
    receiver, loop = Receiver(SETTINGS), asyncio.get_running_loop()
    large = [asyncio.create_task(receiver.receive(never(), LARGE)) for _ in range(2)]
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


async def test_what_is_longer_than_any_may_be_is_not_received():
    receiver = Receiver(SETTINGS)
    with pytest.raises(BodyTooLargeError, match=r"has 5242881 bytes, the limit is 4194304;"):
        await receiver.receive(never(), 5 * MIB + 1)


async def test_a_client_that_hung_up():
    stream = stream_of()
    stream.cancel()
    with pytest.raises(ClientGoneError):
        await Receiver(SETTINGS).receive(stream, 10)


def test_serves_own_proxies_take_what_a_gateway_does(tmp_path):
    environment = serve_environment(tmp_path, (1, 2))
    limit = max_message_bytes(Settings().max_body_bytes)
    assert environment["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] == str(limit)
