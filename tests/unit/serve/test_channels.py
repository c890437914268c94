"""Channels: frames, the choice of a channel, calls and errors, replicas that come and go."""

import asyncio
import contextlib
import gc
import os
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import uvloop
from ray.exceptions import RayActorError

from app.errors import NotReadyError, OverloadedError
from app.serve import channels
from app.serve.replica import classify_many
from app.serve.set_stages import RemoteMember
from app.serve.shared_calls import read_call
from tests.support.cases import cases
from tests.support.channels import APP, WITHIN_S, Node, Waiting, echo, listener, until
from tests.support.fakes import FakeMember, handle_of
from tests.support.hand_clock import HandClock


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


class Reader(channels.FrameProtocol):
    def __init__(self) -> None:
        super().__init__()
        self.frames: list[tuple[int, int, bytes]] = []
        self.connection_made(Transport())

    def frame_received(self, kind, number, payload):
        self.frames.append((kind, number, payload))


SENT = [
    (channels.FrameKind.HELLO, 0, b"TnS1"),
    (channels.FrameKind.CALL, 1, b""),
    (channels.FrameKind.CALL, 2**32 - 1, bytes(100_000)),
    (channels.FrameKind.ANSWER, 7, b"x" * 16),
    (channels.FrameKind.PONG, 0, b""),
]


async def replica_of(
    node: Node, calls: int = 1
) -> tuple[Waiting, channels.Channel, list[asyncio.Task]]:
    """Start a replica that is asked so many things at a time; return it, its channel, the calls."""
    replica = Waiting()
    await node.add(replica)
    channel = await node.channel()
    tasks = [asyncio.create_task(channel.call(b"%d" % number)) for number in range(calls)]
    await until(lambda: len(replica.asked) == min(calls, channels.MAX_CALLS))
    return replica, channel, tasks


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
    reader.data_received(
        channels.FRAME_HEAD.pack(channels.FrameKind.CALL, 1, channels.MAX_PAYLOAD_BYTES + 1)
        + b"and more"
    )
    assert transport.is_aborted
    assert reader.frames == []
    reader.data_received(b"still more")  # what was on its way
    reader.send(channels.FrameKind.PING)  # nothing is written on a connection that ends
    assert transport.written == b""
    reader.abort()
    reader.send(channels.FrameKind.PING)


IMAGE = np.zeros((1, 2, 2, 3), np.uint8)


def replica_end(server: channels.ChannelServer) -> channels.FrameProtocol:
    """Return the replica's end of the only connection to it."""
    # By type, not isinstance: that asks every object of the process for its class, and some warn.
    ends = [one for one in gc.get_objects() if type(one) is channels._Connection]
    (found,) = [one for one in ends if one._server is server and one.transport]
    return found


async def test_of_equals_not_always_the_same_is_chosen(node: Node) -> None:
    """There is none before the router knows a replica here."""
    assert node.pool.choose(1) is None
    node.num_elsewhere = 2
    node.tell()
    assert node.pool.choose(1) is None
    node.num_elsewhere = 0
    for _ in range(3):
        await node.add(echo)
    await node.connected()
    assert len({id(node.pool.choose(1)) for _ in range(200)}) == 3


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


@pytest.mark.parametrize("where", ["elsewhere", "here, without a channel"])
async def test_the_handle_chooses_once_all_here_have_work(where: str, node: Node) -> None:
    replica, _, calls = await replica_of(node, calls=0)
    if where == "elsewhere":
        node.num_elsewhere = 1
    else:
        node.ids.append("listens not")
    node.tell()
    for _ in range(4):  # two at a time in each of two lanes
        calls.append(asyncio.create_task(node.pool.choose(2).call(b"")))
        await asyncio.sleep(0)
    assert node.pool.choose(2) is None
    assert node.pool.choose(3) is not None
    node.num_elsewhere, node.ids = 0, node.ids[:1]
    node.tell()
    assert node.pool.choose(2) is not None
    replica.go_on.set()
    await asyncio.gather(*calls)


async def test_a_silent_one_is_not_chosen_and_the_router_is_told(node: Node) -> None:
    for _ in range(2):
        await node.add(echo)
    await node.connected()
    hanging = node.pool._channels[node.ids[0]]
    hanging._pinged_at = hanging._clock() - channels.SUSPECT_AFTER_S - 1
    assert {node.pool.choose(1) for _ in range(9)} == {node.pool._channels[node.ids[1]]}
    assert [channels.is_silent(name) for name in node.ids] == [True, False]
    hanging.abort()  # it dies
    node.pool.choose(1)
    assert not channels.is_silent(node.ids[0])


async def test_one_that_does_not_read_what_it_is_sent_is_not_chosen(node: Node) -> None:
    replica = Waiting()
    server = await node.add(replica)
    channel = await node.channel()
    end = replica_end(server)
    end.transport.pause_reading()
    call = asyncio.create_task(channel.call(bytes(channels.MAX_UNSENT_BYTES + 2**20)))
    await until(lambda: node.pool.choose(1) is None)
    end.transport.resume_reading()
    await until(lambda: node.pool.choose(1) is channel)
    replica.go_on.set()
    await call


async def test_one_that_leaves_is_let_go_when_it_has_answered(node: Node) -> None:
    replica, channel, (call,) = await replica_of(node)
    (name,) = node.ids
    channels.note_silent(name, is_silent=True)
    node.ids.clear()
    node.tell()
    assert node.pool.choose(1) is None
    assert not channels.is_silent(name)
    assert channel.transport is not None
    replica.go_on.set()
    assert await call == b"0"
    await until(lambda: channel.transport is None)


async def test_a_connection_that_ended_is_made_again_after_a_while(node, monkeypatch):
    monkeypatch.setattr(channels, "RECONNECT_AFTER_S", 0.05)
    await node.add(echo)
    first = await node.channel()
    first.transport.abort()
    await until(lambda: first.transport is None)
    assert node.pool.choose(1) is None
    assert await (await node.channel()).call(b"again") == b"niaga"


class ByRay(FakeMember):
    """A stage that is called by Ray; notes how many questions each message had."""

    def __init__(self) -> None:
        super().__init__()
        self.num_questions: list[int] = []

    async def classify_many(self, message: bytes) -> bytes:
        self.num_questions.append(len(read_call(message).questions))
        return await classify_many(self, message)  # type: ignore[arg-type]


async def test_who_does_not_listen_is_called_through_ray(node: Node) -> None:
    node.ids = ["no such replica"]
    node.tell()
    stage = ByRay()
    remote = RemoteMember(handle_of(stage), channels=node.pool)
    for _ in range(3):
        answer = await remote.classify(IMAGE, 60, "interactive")
        assert answer.probabilities.shape == (1, 3)
    assert stage.num_questions == [1, 1, 1]


async def test_a_request_whose_replica_dies_is_answered_by_ray(node: Node) -> None:
    replica, stage = Waiting(), ByRay()

    async def answer(message: bytes) -> bytes:
        await replica(message)
        return await classify_many(FakeMember(), message)  # type: ignore[arg-type]

    await node.add(answer)
    handle: Any = handle_of(stage)
    handle.app_name, handle.deployment_name = APP, node.name
    remote, channel = RemoteMember(handle, channels=node.pool), await node.channel()
    replica.go_on.set()
    await remote.classify(IMAGE, 60, "interactive")
    assert stage.num_questions == []
    replica.go_on.clear()
    asked = asyncio.create_task(remote.classify(IMAGE, 60, "interactive"))
    await until(lambda: len(replica.asked) == 2)
    channel.transport.abort()
    assert (await asked).probabilities.shape == (1, 3)
    assert stage.num_questions == [1]


# One channel: calls and answers, errors, cancellation, and replicas that end or say nothing.


HELLO = (
    channels.FRAME_HEAD.pack(channels.FrameKind.HELLO, 0, len(channels.VERSION)) + channels.VERSION
)


@cases(
    "error, raised, says",
    (OverloadedError("no room", 3), OverloadedError, "no room"),
    (ZeroDivisionError("a secret of the replica"), NotReadyError, "ZeroDivisionError"),
    (asyncio.CancelledError(), NotReadyError, "try again"),  # the replica itself ends it
)
async def test_an_error_of_ours_comes_as_it_was_raised(node, caplog, error, raised, says):
    async def fail(_: bytes) -> bytes:
        raise error

    await node.add(fail)
    channel = await node.channel()
    async with asyncio.timeout(30):
        with pytest.raises(raised, match=says) as caught:
            await channel.call(b"")
    assert getattr(caught.value, "limit", None) == getattr(error, "limit", None)
    assert "secret" not in str(caught.value)
    assert ("a secret of the replica" in caplog.text) == isinstance(error, ZeroDivisionError)


async def test_a_replica_has_so_many_calls(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_CALLS", 2)
    replica, _, calls = await replica_of(node, calls=3)
    with pytest.raises(OverloadedError, match="2 calls"):
        await calls[2]
    replica.go_on.set()
    assert await asyncio.gather(*calls[:2]) == [b"0", b"1"]


async def test_one_that_computes_says_that_it_is_there(node, monkeypatch):
    monkeypatch.setattr(channels, "PING_AFTER_S", 0.01)
    pings, send = [], channels.Channel.send

    def noting(channel: channels.Channel, kind: channels.FrameKind, *args: Any) -> None:
        pings.append(kind)
        send(channel, kind, *args)

    monkeypatch.setattr(channels.Channel, "send", noting)
    replica, channel, (call,) = await replica_of(node)
    await until(
        lambda: pings.count(channels.FrameKind.PING) >= 3
    )  # each was answered before the next
    assert not channel.is_silent
    replica.go_on.set()
    await call
    await until(lambda: channel._look is None)  # nothing is due: nobody is asked


async def test_one_that_says_nothing_is_silent_until_it_speaks(monkeypatch):
    """Though nobody looks at it meanwhile: whoever makes a second call must find it so."""
    monkeypatch.setattr(channels, "PING_AFTER_S", 0.01)
    clock, heard = HandClock(), b""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        writer.write(HELLO)
        while more := await reader.read(1000):
            heard += more
            clock.now += 0.02

    async with listener(hang) as name:
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: channels.Channel(clock), name)
        assert await channel.opened
        call = asyncio.create_task(channel.call(b"?"))
        await until(lambda: heard.endswith(channels.FRAME_HEAD.pack(channels.FrameKind.PING, 0, 0)))
        assert not channel.is_silent
        clock.now += channels.SUSPECT_AFTER_S + 0.1
        assert channel.is_silent
        channel.frame_received(channels.FrameKind.PONG, 0, b"")
        assert not channel.is_silent
        channel.abort()
        with pytest.raises(channels.ConnectionLostError):
            await call


@pytest.mark.parametrize("says", [HELLO[:-1] + b"0", b""], ids=["older", "nothing"])
async def test_another_version_of_the_program_is_not_called(says, monkeypatch):
    monkeypatch.setattr(channels, "OPEN_WITHIN_S", 0.2)

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        await reader.read()

    async with listener(other) as name:
        with pytest.raises(ConnectionRefusedError, match="another version"):
            await channels.connected(name)


async def test_neither_end_speaks_with_another_users_process(node, monkeypatch, caplog):
    replica = Waiting()
    replica.go_on.set()
    await node.add(replica)
    address = channels.address_of(APP, node.name, node.ids[0])
    monkeypatch.setattr(channels, "is_same_user", lambda _: False)
    with pytest.raises(ConnectionRefusedError, match="another user's"):
        await channels.connected(address)
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect(address)
    sock.send(
        channels.FRAME_HEAD.pack(channels.FrameKind.CALL, 1, 2) + b"hi"
    )  # without waiting to be greeted
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    assert replica.asked == []
    assert "another user" in caplog.text


async def test_the_kernel_says_who_is_there(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.add(echo)
    transport: Any = (await node.channel()).transport
    assert channels.is_same_user(transport)
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not channels.is_same_user(transport)

    def none_left(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", none_left)
    assert not channels.is_same_user(transport)


async def test_what_is_no_frame_of_a_client_ends_the_connection(node: Node) -> None:
    await node.add(echo)
    channel = await node.channel()
    channel.send(channels.FrameKind.ANSWER, 5, b"an answer that nobody asked for")
    await until(lambda: channel.transport is None)


@pytest.mark.parametrize("payload", [b"no JSON", b"[1]", b'["OverloadedError", 5]'])
async def test_what_is_no_error_of_ours_is_one_all_the_same(payload, node: Node) -> None:
    _, channel, (call,) = await replica_of(node)
    channel.frame_received(channels.FrameKind.ERROR, next(iter(channel._calls)), payload)
    with pytest.raises(NotReadyError):
        await call


async def is_refused(address: str) -> bool:
    """Whether nobody listens; who accepts a connection and closes it still does."""
    try:
        (await channels.connected(address)).abort()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


async def test_a_replica_that_ends_answers_what_is_under_way_first(node: Node) -> None:
    replica = Waiting()
    server = await node.add(replica)
    call = asyncio.create_task((await node.channel()).call(b"last"))
    await until(lambda: replica.asked)
    drained = asyncio.create_task(server.drain())
    async with asyncio.timeout(WITHIN_S):
        while not await is_refused(channels.address_of(APP, node.name, node.ids[0])):
            await asyncio.sleep(0)
    assert not drained.done()
    replica.go_on.set()
    assert await call == b"last"
    await drained


def test_names_of_any_length_are_addresses() -> None:
    assert len(channels.address_of("a" * 200, "é" * 200, "replica").encode()) <= 108


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_on_asyncio_and_on_uvloop_which_ray_takes_where_it_is_installed(run) -> None:
    """Each call gets its own answer; a call that nobody waits for ends in the replica."""

    async def scenario() -> None:
        node, waiting = Node(), Waiting()
        await node.add(echo)
        channel = await node.channel()
        assert channels.is_same_user(channel.transport)  # type: ignore[arg-type]
        asked = [bytes([n]) * size for n, size in enumerate((0, 1, 5_000, 3_000_000, 70_000))]
        assert await asyncio.gather(*map(channel.call, asked)) == [one[::-1] for one in asked]
        assert channel.num_calls == 0
        node.ids.clear()
        server = await node.add(waiting)
        channel = await node.channel()
        calls = [asyncio.create_task(channel.call(message)) for message in (b"gone", b"stays")]
        await until(lambda: len(waiting.asked) == 2)
        calls[0].cancel()
        await until(lambda: waiting.cancelled == [b"gone"])
        waiting.go_on.set()
        assert await calls[1] == b"stays"
        waiting.go_on.clear()
        lost = asyncio.create_task(channel.call(b"lost"))
        await until(lambda: len(waiting.asked) == 3)
        channel.transport.abort()
        for call in (lost, channel.call(b"more")):
            with pytest.raises(channels.ConnectionLostError):
                await call
        assert issubclass(
            channels.ConnectionLostError, RayActorError
        )  # app.graph.availability calls again
        await until(lambda: server.num_calls == 0)
        await server.drain()
        with pytest.raises(ConnectionRefusedError):
            await channels.connected(channels.address_of(APP, node.name, node.ids[0]))
        await node.close()

    run(scenario())
