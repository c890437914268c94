"""Frames: what is written is read again, however the stream is cut.

The choice of a channel, and what becomes of channels when replicas come and go.
"""

import asyncio
import gc
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from app.serve import channels
from app.serve.channels import (
    FRAME_HEAD,
    MAX_PAYLOAD_BYTES,
    MAX_UNSENT_BYTES,
    SUSPECT_AFTER_S,
    ChannelServer,
    FrameKind,
    FrameProtocol,
    _Connection,
    is_silent,
    note_silent,
)
from app.serve.remote import RemoteMember
from app.serve.replica import classify_many
from app.serve.shared_calls import read_call
from tests.support.channels import APP, Node, Waiting, echo, until
from tests.support.fakes import FakeMember, handle_of


@pytest_asyncio.fixture
async def node() -> AsyncIterator[Node]:
    found = Node()
    yield found
    await found.close()


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written, self.is_aborted = b"", False

    def writelines(self, parts):
        self.written += b"".join(parts)

    def is_closing(self):
        return self.is_aborted

    def abort(self):
        self.is_aborted = True


class Reader(FrameProtocol):
    def __init__(self) -> None:
        super().__init__()
        self.frames: list[tuple[int, int, bytes]] = []
        self.connection_made(Transport())

    def frame_received(self, kind, number, payload):
        self.frames.append((kind, number, payload))


SENT = [
    (FrameKind.HELLO, 0, b"TnS1"),
    (FrameKind.CALL, 1, b""),
    (FrameKind.CALL, 2**32 - 1, bytes(100_000)),
    (FrameKind.ANSWER, 7, b"x" * 16),
    (FrameKind.PONG, 0, b""),
]


@pytest.mark.parametrize("most", [1, 3, 17, 300_000])
def test_frames_are_read_as_they_were_written(most: int) -> None:
    writer, reader = Reader(), Reader()
    for kind, number, payload in SENT:
        writer.send(kind, number, payload)
    stream, place, draw = writer.transport.written, 0, random.Random(most)
    while place < len(stream):
        size = draw.randint(1, most)
        reader.data_received(stream[place : place + size])
        place += size
    assert reader.frames == SENT


def test_what_is_too_long_ends_the_connection_before_it_is_there() -> None:
    reader = Reader()
    transport = reader.transport
    reader.data_received(FRAME_HEAD.pack(FrameKind.CALL, 1, MAX_PAYLOAD_BYTES + 1) + b"and more")
    assert transport.is_aborted
    assert reader.frames == []
    reader.data_received(b"still more")  # what was on its way


def test_on_a_connection_that_ends_nothing_is_written() -> None:
    reader = Reader()
    transport = reader.transport
    transport.is_aborted = True
    reader.send(FrameKind.PING)
    assert transport.written == b""
    reader.abort()
    reader.send(FrameKind.PING)


IMAGE = np.zeros((1, 2, 2, 3), np.uint8)


def replica_end(server: ChannelServer) -> FrameProtocol:
    """Return the replica's end of the only connection to it."""
    # By type, not isinstance: that asks every object of the process for its class, and some warn.
    ends = [one for one in gc.get_objects() if type(one) is _Connection]
    (found,) = [one for one in ends if one._server is server and one.transport]
    return found


async def test_there_is_none_before_the_router_knows_a_replica_here(node: Node) -> None:
    assert node.pool.choose(1) is None
    node.num_elsewhere = 2
    node.tell()
    assert node.pool.choose(1) is None


async def test_the_one_with_the_fewest_calls_is_chosen(node: Node) -> None:
    replicas = [Waiting(), Waiting()]
    for replica in replicas:
        await node.add(replica)
    await node.connected()
    calls = []
    for number in range(6):
        calls.append(asyncio.create_task(node.pool.choose(1).call(b"%d" % number)))
        await asyncio.sleep(0)
    await until(lambda: [len(replica.asked) for replica in replicas] == [3, 3])
    for replica in replicas:
        replica.go_on.set()
    await asyncio.gather(*calls)


async def test_of_equals_not_always_the_same_is_chosen(node: Node) -> None:
    for _ in range(3):
        await node.add(echo)
    await node.connected()
    assert len({id(node.pool.choose(1)) for _ in range(200)}) == 3


@pytest.mark.parametrize("where", ["elsewhere", "here, without a channel"])
async def test_the_handle_chooses_once_all_here_have_work(where: str, node: Node) -> None:
    replica = Waiting()
    await node.add(replica)
    await node.connected()
    if where == "elsewhere":
        node.num_elsewhere = 1
    else:
        node.ids.append("listens not")
    node.tell()
    calls = []
    for _ in range(4):  # two at a time in each of two lanes
        calls.append(asyncio.create_task(node.pool.choose(2).call(b"")))
        await asyncio.sleep(0)
    assert node.pool.choose(2) is None
    assert node.pool.choose(3) is not None
    node.num_elsewhere = 0
    node.ids = node.ids[:1]
    node.tell()
    assert node.pool.choose(2) is not None
    replica.go_on.set()
    await asyncio.gather(*calls)


async def test_a_silent_one_is_not_chosen_and_the_router_is_told(node: Node) -> None:
    for _ in range(2):
        await node.add(echo)
    await node.connected()
    hanging = node.pool._channels[node.ids[0]]
    hanging._pinged_at = hanging._clock() - SUSPECT_AFTER_S - 1
    assert {node.pool.choose(1) for _ in range(9)} == {node.pool._channels[node.ids[1]]}
    assert [is_silent(name) for name in node.ids] == [True, False]
    hanging.abort()  # it dies
    node.pool.choose(1)
    assert not is_silent(node.ids[0])


async def test_one_that_does_not_read_what_it_is_sent_is_not_chosen(node: Node) -> None:
    replica = Waiting()
    server = await node.add(replica)
    channel = await node.channel()
    end = replica_end(server)
    end.transport.pause_reading()
    call = asyncio.create_task(channel.call(bytes(MAX_UNSENT_BYTES + 2**20)))
    await until(lambda: node.pool.choose(1) is None)
    end.transport.resume_reading()
    await until(lambda: node.pool.choose(1) is channel)
    replica.go_on.set()
    await call


async def test_one_that_leaves_is_let_go_when_it_has_answered(node: Node) -> None:
    replica = Waiting()
    server = await node.add(replica)
    channel, name = await node.channel(), node.ids[0]
    call = asyncio.create_task(channel.call(b"last"))
    await until(lambda: replica.asked)
    note_silent(name, is_silent=True)
    node.ids.clear()
    node.tell()
    assert node.pool.choose(1) is None
    assert not is_silent(name)
    assert channel.transport is not None
    replica.go_on.set()
    assert await call == b"last"
    await until(lambda: channel.transport is None)
    assert server.num_calls == 0


async def test_a_connection_that_ended_is_made_again_after_a_while(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "RECONNECT_AFTER_S", 0.05)
    await node.add(echo)
    first = await node.channel()
    first.transport.abort()
    await until(lambda: first.transport is None)
    assert node.pool.choose(1) is None
    assert await (await node.channel()).call(b"again") == b"niaga"


async def test_who_does_not_listen_is_called_through_ray(node: Node) -> None:
    node.ids = ["no such replica"]
    node.tell()
    asked = []

    class Stage(FakeMember):
        async def classify_many(self, message: bytes) -> bytes:
            asked.append(len(read_call(message).questions))
            return await classify_many(self, message)  # type: ignore[arg-type]

    handle = handle_of(Stage())
    remote = RemoteMember(handle, channels=node.pool)
    for _ in range(3):
        answer = await remote.classify(IMAGE, 60, "interactive")
        assert answer.probabilities.shape == (1, 3)
    assert asked == [1, 1, 1]


async def test_a_request_whose_replica_dies_is_answered_by_ray(node: Node) -> None:
    replica, by_ray = Waiting(), []

    async def answer(message: bytes) -> bytes:
        await replica(message)
        return await classify_many(FakeMember(), message)  # type: ignore[arg-type]

    class Stage(FakeMember):
        async def classify_many(self, message: bytes) -> bytes:
            by_ray.append(message)
            return await classify_many(self, message)  # type: ignore[arg-type]

    await node.add(answer)
    handle = handle_of(Stage())
    named: Any = handle
    named.app_name, named.deployment_name = APP, node.name
    remote, channel = RemoteMember(handle, channels=node.pool), await node.channel()
    replica.go_on.set()
    await remote.classify(IMAGE, 60, "interactive")
    assert by_ray == []
    replica.go_on.clear()
    asked = asyncio.create_task(remote.classify(IMAGE, 60, "interactive"))
    await until(lambda: len(replica.asked) == 2)
    channel.transport.abort()
    assert (await asked).probabilities.shape == (1, 3)
    assert len(by_ray) == 1
