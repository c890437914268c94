"""One channel: calls and answers, errors, cancellation, and replicas that end or say nothing."""

import asyncio
import os

import pytest
from ray.exceptions import RayActorError

from app.calls.channels import address, client
from app.calls.channels import server as servers
from app.calls.channels.address import address_of
from app.calls.channels.client import PING_AFTER_S, Channel, ConnectionLostError
from app.calls.channels.frames import HEAD, VERSION, Kind
from app.calls.failure_detector import SUSPECT_AFTER_S
from app.errors import NotReadyError, OverloadedError
from tests.support.channels import Node, Waiting, echo, listener, until
from tests.support.hand_clock import HandClock

HELLO = HEAD.pack(Kind.HELLO, 0, len(VERSION)) + VERSION


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
    assert raised.value.retry_after_s == 3


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


async def test_the_calls_of_a_replica_that_ends_are_made_elsewhere(node: Node) -> None:
    replica = Waiting()
    await node.add(replica)
    channel = await node.channel()
    call = asyncio.create_task(channel.call(b"lost"))
    await until(lambda: replica.asked)
    channel.transport.abort()  # what either end sees when the other's process ends
    with pytest.raises(ConnectionLostError):
        await call
    assert issubclass(ConnectionLostError, RayActorError)  # which app.calls.retry calls again
    await until(lambda: replica.cancelled == [b"lost"])
    with pytest.raises(ConnectionLostError):
        await channel.call(b"more")


async def test_a_replica_has_so_many_calls(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "MAX_CALLS", 2)
    replica = Waiting()
    await node.add(replica)
    channel = await node.channel()
    calls = [asyncio.create_task(channel.call(b"%d" % n)) for n in range(3)]
    with pytest.raises(OverloadedError, match="2 calls"):
        await calls[2]
    replica.go_on.set()
    assert await asyncio.gather(*calls[:2]) == [b"0", b"1"]


async def test_one_that_computes_answers_when_it_is_asked_whether_it_is_there(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HandClock()
    monkeypatch.setattr(client.Channel.__init__, "__defaults__", (clock,))
    replica = Waiting()
    await node.add(replica)
    channel = await node.channel()
    call = asyncio.create_task(channel.call(b"long"))
    await until(lambda: replica.asked)
    for _ in range(5):
        clock.now += PING_AFTER_S + 0.1
        assert not channel.check_silence()
        assert channel._pinged_at == clock.now
        await until(lambda: channel._pinged_at is None)
    replica.go_on.set()
    await call
    clock.now += 3600  # nothing is due
    assert not channel.check_silence()
    assert channel._pinged_at is None


async def test_one_that_says_nothing_is_silent_until_it_speaks() -> None:
    clock = HandClock()
    heard: list[bytes] = []

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        heard.append(await reader.read(1000))
        heard.append(await reader.read(1000))

    async with listener(hang) as name:
        _, channel = await asyncio.get_running_loop().create_unix_connection(
            lambda: Channel(clock), name
        )
        await until(lambda: channel.is_open)
        call = asyncio.create_task(channel.call(b"?"))
        await until(lambda: len(heard) == 1)
        clock.now += PING_AFTER_S + 0.1
        assert not channel.check_silence()  # it is asked now
        await until(lambda: len(heard) == 2)
        clock.now += SUSPECT_AFTER_S + 0.1
        assert channel.check_silence()
        channel.frame_received(Kind.PONG, 0, b"")
        assert not channel.check_silence()
        call.cancel()
        channel.abort()


async def test_another_version_of_the_program_is_not_called() -> None:
    async def older(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO[:-1] + b"0")
        await reader.read()

    async with listener(older) as name:
        _, channel = await asyncio.get_running_loop().create_unix_connection(Channel, name)
        await until(lambda: channel.transport is None)
        assert not channel.is_open


@pytest.mark.parametrize("end", ["client", "server"])
async def test_another_users_process_is_hung_up_on(
    node: Node, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is asked says that the other end is a stranger."""
    judged = iter([end == "client", end != "client"])  # the client looks first
    for module in (client, servers):
        monkeypatch.setattr(module, "is_same_user", lambda _: not next(judged))
    await node.add(echo)
    node.pool.choose(1)
    await until(lambda: next(judged, None) is None)
    await asyncio.sleep(0.05)
    assert node.pool.choose(1) is None


async def test_the_kernel_says_who_is_there(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.add(echo)
    channel = await node.channel()
    assert address.is_same_user(channel.transport)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not address.is_same_user(channel.transport)


async def test_what_is_no_frame_of_a_client_ends_the_connection(node: Node) -> None:
    await node.add(echo)
    channel = await node.channel()
    channel.send(Kind.ANSWER, 5, b"an answer that nobody asked for")
    await until(lambda: channel.transport is None)


def test_names_of_any_length_are_addresses() -> None:
    assert len(address_of("a" * 200, "é" * 200, "replica").encode()) <= 108
