"""The choice of a channel, and what becomes of channels when replicas come and go."""

import asyncio

import numpy as np
import pytest

from app.calls.call_messages import read_call
from app.calls.channels import pool as pools
from app.calls.known_replicas import channel_calls, is_silent, note_channel
from app.calls.remote import RemoteMember
from app.deployments.many import classify_many
from tests.support.channels import APP, Node, Waiting, echo, until
from tests.support.fakes import FakeHandle, FakeMember

IMAGE = np.zeros((1, 2, 2, 3), np.uint8)


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


async def test_the_handle_chooses_once_all_here_have_work(
    node: Node,
) -> None:
    replica = Waiting()
    node.num_elsewhere = 1
    await node.add(replica)
    calls = []
    for _ in range(2):
        calls.append(asyncio.create_task((await node.channel(num_at_once=2)).call(b"")))
        await asyncio.sleep(0)
    assert node.pool.choose(2) is None
    assert node.pool.choose(3) is not None
    assert channel_calls(node.ids[0]) == 2  # Serve's router counts them too
    node.num_elsewhere = 0
    node.tell()
    assert node.pool.choose(2) is not None
    replica.go_on.set()
    await asyncio.gather(*calls)


async def test_a_silent_one_is_not_chosen_and_the_router_is_told(node: Node) -> None:
    for _ in range(2):
        await node.add(echo)
    await node.connected()
    hanging = node.pool._channels[node.ids[0]]
    hanging.check_silence = lambda: True
    assert {node.pool.choose(1) for _ in range(4)} == {node.pool._channels[node.ids[1]]}
    assert [is_silent(name) for name in node.ids] == [True, False]
    del hanging.check_silence
    node.pool.choose(1)
    assert not is_silent(node.ids[0])


async def test_one_that_does_not_read_what_it_is_sent_is_not_chosen(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.add(echo)
    await node.channel()
    monkeypatch.setattr(pools, "MAX_UNSENT_BYTES", 0)
    assert node.pool.choose(1) is None


async def test_one_that_leaves_is_let_go_when_it_has_answered(node: Node) -> None:
    replica = Waiting()
    server = await node.add(replica)
    channel, name = await node.channel(), node.ids[0]
    call = asyncio.create_task(channel.call(b"last"))
    await until(lambda: replica.asked)
    note_channel(name, 1, is_silent=True)
    node.ids.clear()
    node.tell()
    assert node.pool.choose(1) is None
    assert (channel_calls(name), is_silent(name)) == (0, False)
    assert channel.transport is not None
    replica.go_on.set()
    assert await call == b"last"
    await until(lambda: channel.transport is None)
    assert server.num_calls == 0


async def test_a_connection_that_ended_is_made_again_after_a_while(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "RECONNECT_AFTER_S", 0.05)
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
            return await classify_many(self, message)

    handle = FakeHandle(Stage())
    remote = RemoteMember(handle, channels=node.pool)
    for _ in range(3):
        answer = await remote.classify(IMAGE, 60, "interactive")
        assert answer.probabilities.shape == (1, 3)
    assert asked == [1, 1, 1]


async def test_a_request_whose_replica_dies_is_answered_by_ray(node: Node) -> None:
    replica, by_ray = Waiting(), []

    async def answer(message: bytes) -> bytes:
        await replica(message)
        return await classify_many(FakeMember(), message)

    class Stage(FakeMember):
        async def classify_many(self, message: bytes) -> bytes:
            by_ray.append(message)
            return await classify_many(self, message)

    await node.add(answer)
    handle = FakeHandle(Stage())
    handle.app_name, handle.deployment_name = APP, node.name
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
