"""One channel: calls and answers, errors, cancellation, and replicas that end or say nothing."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from ray.exceptions import RayActorError

from app.errors import NotReadyError, OverloadedError
from app.serve import channels
from app.serve.channels import (
    FRAME_HEAD,
    SUSPECT_AFTER_S,
    VERSION,
    Channel,
    ConnectionLostError,
    FrameKind,
    address_of,
    connected,
)
from tests.support.channels import APP, WITHIN_S, Node, Waiting, echo, listener, until
from tests.support.hand_clock import HandClock


@pytest_asyncio.fixture
async def node() -> AsyncIterator[Node]:
    found = Node()
    yield found
    await found.close()


HELLO = FRAME_HEAD.pack(FrameKind.HELLO, 0, len(VERSION)) + VERSION


async def test_calls_at_a_time_get_their_own_answers(node: Node) -> None:
    await node.add(echo)
    channel = await node.channel()
    asked = [bytes([n]) * size for n, size in enumerate((0, 1, 5_000, 3_000_000, 70_000))]
    assert await asyncio.gather(*map(channel.call, asked)) == [one[::-1] for one in asked]
    assert channel.num_calls == 0


async def test_an_error_of_ours_comes_as_it_was_raised(node: Node) -> None:
    async def refuse(_: bytes) -> bytes:
        raise OverloadedError("no room", 3)

    await node.add(refuse)
    with pytest.raises(OverloadedError, match="no room") as raised:
        await (await node.channel()).call(b"")
    assert raised.value.limit == 3


async def test_any_other_error_is_in_the_replicas_log_alone(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: bytes) -> bytes:
        raise ZeroDivisionError("a secret of the replica")

    await node.add(fail)
    with pytest.raises(NotReadyError, match="ZeroDivisionError") as raised:
        await (await node.channel()).call(b"")
    assert "secret" not in str(raised.value)
    assert "a secret of the replica" in caplog.text


async def test_a_call_that_nobody_waits_for_ends_in_the_replica(node: Node) -> None:
    replica = Waiting()
    server = await node.add(replica)
    channel = await node.channel()
    calls = [asyncio.create_task(channel.call(message)) for message in (b"gone", b"stays")]
    await until(lambda: len(replica.asked) == 2)
    calls[0].cancel()
    await until(lambda: replica.cancelled == [b"gone"])
    replica.go_on.set()
    assert await calls[1] == b"stays"
    await until(lambda: server.num_calls == 0)
    assert channel.num_calls == 0


async def test_a_call_that_the_replica_itself_ends_is_answered(node: Node) -> None:
    async def end(_: bytes) -> bytes:
        raise asyncio.CancelledError

    await node.add(end)
    channel = await node.channel()
    async with asyncio.timeout(30):
        with pytest.raises(NotReadyError, match="try again"):
            await channel.call(b"")


async def test_the_calls_of_a_replica_that_ends_are_made_elsewhere(node: Node) -> None:
    replica = Waiting()
    await node.add(replica)
    channel = await node.channel()
    call = asyncio.create_task(channel.call(b"lost"))
    await until(lambda: replica.asked)
    channel.transport.abort()  # what either end sees when the other's process ends
    with pytest.raises(ConnectionLostError):
        await call
    assert issubclass(ConnectionLostError, RayActorError)  # which app.graph.attempts calls again
    await until(lambda: replica.cancelled == [b"lost"])
    with pytest.raises(ConnectionLostError):
        await channel.call(b"more")


async def test_a_replica_has_so_many_calls(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_CALLS", 2)
    replica = Waiting()
    await node.add(replica)
    channel = await node.channel()
    calls = [asyncio.create_task(channel.call(b"%d" % n)) for n in range(3)]
    with pytest.raises(OverloadedError, match="2 calls"):
        await calls[2]
    replica.go_on.set()
    assert await asyncio.gather(*calls[:2]) == [b"0", b"1"]


async def test_one_that_computes_says_that_it_is_there(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "PING_AFTER_S", 0.01)
    pings = []
    replica = Waiting()
    await node.add(replica)
    channel = await node.channel()
    send = channel.send

    def noting(kind: FrameKind, *args: Any) -> None:
        pings.append(kind)
        send(kind, *args)

    monkeypatch.setattr(channel, "send", noting)
    call = asyncio.create_task(channel.call(b"long"))
    await until(lambda: pings.count(FrameKind.PING) >= 3)  # each was answered before the next
    assert not channel.is_silent
    replica.go_on.set()
    await call
    await until(lambda: channel._look is None)  # nothing is due: nobody is asked


async def test_one_that_says_nothing_is_silent_until_it_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though nobody looks at it meanwhile: whoever makes a second call must find it so."""
    monkeypatch.setattr(channels, "PING_AFTER_S", 0.01)
    clock, heard = HandClock(), b""
    told = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        writer.write(HELLO)
        while more := await reader.read(1000):
            heard += more
            clock.now += 0.02
            told.set()

    async with listener(hang) as name:
        _, channel = await asyncio.get_running_loop().create_unix_connection(
            lambda: Channel(clock), name
        )
        assert await channel.opened
        call = asyncio.create_task(channel.call(b"?"))
        await until(lambda: heard.endswith(FRAME_HEAD.pack(FrameKind.PING, 0, 0)))
        assert not channel.is_silent
        clock.now += SUSPECT_AFTER_S + 0.1
        assert channel.is_silent
        channel.frame_received(FrameKind.PONG, 0, b"")
        assert not channel.is_silent
        channel.abort()
        with pytest.raises(ConnectionLostError):
            await call


@pytest.mark.parametrize("says", [HELLO[:-1] + b"0", b""], ids=["older", "nothing"])
async def test_another_version_of_the_program_is_not_called(
    says: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "OPEN_WITHIN_S", 0.2)

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        await reader.read()

    async with listener(other) as name:
        with pytest.raises(ConnectionRefusedError, match="another version"):
            await connected(name)


async def test_a_client_hangs_up_on_another_users_process(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.add(echo)
    monkeypatch.setattr(channels, "is_same_user", lambda _: False)
    with pytest.raises(ConnectionRefusedError, match="another user's"):
        await connected(address_of(APP, node.name, node.ids[0]))


async def test_a_replica_answers_no_call_of_another_users_process(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[bytes] = []

    async def answer(message: bytes) -> bytes:
        asked.append(message)
        return message

    await node.add(answer)
    monkeypatch.setattr(channels, "is_same_user", lambda _: False)
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect(address_of(APP, node.name, node.ids[0]))
    sock.send(FRAME_HEAD.pack(FrameKind.CALL, 1, 2) + b"hi")  # without waiting to be greeted
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    assert asked == []
    assert "another user" in caplog.text


async def test_the_kernel_says_who_is_there(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.add(echo)
    channel = await node.channel()
    assert channels.is_same_user(channel.transport)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not channels.is_same_user(channel.transport)  # type: ignore[arg-type]


async def test_what_is_no_frame_of_a_client_ends_the_connection(node: Node) -> None:
    await node.add(echo)
    channel = await node.channel()
    channel.send(FrameKind.ANSWER, 5, b"an answer that nobody asked for")
    await until(lambda: channel.transport is None)


async def test_without_a_file_descriptor_nobody_is_trusted(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.add(echo)
    channel = await node.channel()

    def none_left(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", none_left)
    assert not channels.is_same_user(channel.transport)  # type: ignore[arg-type]


async def is_refused(address: str) -> bool:
    """Whether nobody listens; who accepts a connection and closes it still does."""
    try:
        (await connected(address)).abort()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


async def test_a_replica_that_ends_answers_what_is_under_way_first(node: Node) -> None:
    replica = Waiting()
    server = await node.add(replica)
    channel = await node.channel()
    call = asyncio.create_task(channel.call(b"last"))
    await until(lambda: replica.asked)
    drained = asyncio.create_task(server.drain())
    async with asyncio.timeout(WITHIN_S):
        while not await is_refused(address_of(APP, node.name, node.ids[0])):
            await asyncio.sleep(0)
    assert not drained.done()
    replica.go_on.set()
    assert await call == b"last"
    await drained


async def test_what_is_no_error_of_ours_is_one_all_the_same(node: Node) -> None:
    replica = Waiting()
    await node.add(replica)
    channel = await node.channel()
    for payload in (b"no JSON", b"[1]", b'["OverloadedError", 5]'):
        call = asyncio.create_task(channel.call(b""))
        await until(lambda: channel.num_calls == 1)
        channel.frame_received(FrameKind.ERROR, next(iter(channel._calls)), payload)
        with pytest.raises(NotReadyError):
            await call


def test_names_of_any_length_are_addresses() -> None:
    assert len(address_of("a" * 200, "é" * 200, "replica").encode()) <= 108


def test_on_uvloop_which_ray_takes_where_it_is_installed() -> None:
    async def scenario() -> None:
        node, waiting = Node(), Waiting()
        await node.add(echo)
        channel = await node.channel()
        assert channels.is_same_user(channel.transport)  # type: ignore[arg-type]
        asked = [bytes([n]) * size for n, size in enumerate((0, 1, 3_000_000, 70_000))]
        assert await asyncio.gather(*map(channel.call, asked)) == [one[::-1] for one in asked]
        node.ids.clear()
        server = await node.add(waiting)
        channel = await node.channel()
        calls = [asyncio.create_task(channel.call(message)) for message in (b"gone", b"lost")]
        await until(lambda: len(waiting.asked) == 2)
        calls[0].cancel()
        await until(lambda: waiting.cancelled == [b"gone"])
        channel.transport.abort()
        with pytest.raises(ConnectionLostError):
            await calls[1]
        await until(lambda: server.num_calls == 0)
        await server.drain()
        with pytest.raises(ConnectionRefusedError):
            await connected(address_of(APP, node.name, node.ids[0]))
        await node.close()

    uvloop.run(scenario())
