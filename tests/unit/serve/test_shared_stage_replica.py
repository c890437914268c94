"""A stage's replica listens for the Gateways of its node, and ends when they are answered."""

from types import SimpleNamespace

import pytest
from ray import serve

from app.serve import replica
from app.serve.channels import ChannelServer, address_of, connected
from app.serve.replica import SharedStageReplica
from app.settings import Settings


class Stage:
    def __init__(self, settings: Settings) -> None:
        self.num_checks = 0

    async def check_health(self) -> None:
        self.num_checks += 1


class Replica(SharedStageReplica, Stage):
    async def answer_many(self, message: bytes) -> bytes:
        return message


CONTEXT = SimpleNamespace(
    app_name="app", deployment="stage", replica_id=SimpleNamespace(unique_id="of-a-test")
)


@pytest.fixture(autouse=True)
def _no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "start_replica", lambda _: None)
    monkeypatch.setattr(serve, "get_replica_context", lambda: CONTEXT)


async def test_it_listens_from_its_first_health_check_on_until_it_ends() -> None:
    replica = Replica(Settings())
    assert "__del__" in vars(replica)  # where Serve looks, and not the garbage collector
    assert not hasattr(type(replica), "__del__")
    for _ in range(2):
        await replica.check_health()
    assert replica.num_checks == 2
    channel = await connected(address_of("app", "stage", "of-a-test"))
    assert await channel.call(b"!") == b"!"
    await replica.__del__()
    with pytest.raises(ConnectionRefusedError):
        await connected(address_of("app", "stage", "of-a-test"))
    channel.abort()


@pytest.mark.parametrize("is_there", [True, False])
async def test_without_channels_it_does_not_listen(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(replica, "IS_THERE", is_there)  # False: no Linux
    replica = Replica(Settings(local_channels=not is_there))
    await replica.check_health()
    with pytest.raises(ConnectionRefusedError):
        await connected(address_of("app", "stage", "of-a-test"))
    await replica.__del__()


async def test_if_it_cannot_listen_it_works_and_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, num_starts = ChannelServer.start, 0

    async def fail_once(server: ChannelServer) -> None:
        nonlocal num_starts
        num_starts += 1
        if num_starts == 1:
            raise OSError(24, "Too many open files")
        await start(server)

    monkeypatch.setattr(ChannelServer, "start", fail_once)
    replica = Replica(Settings())
    await replica.check_health()
    assert replica.num_checks == 1
    assert "Too many open files" in caplog.text
    await replica.check_health()
    (await connected(address_of("app", "stage", "of-a-test"))).abort()
    await replica.__del__()
