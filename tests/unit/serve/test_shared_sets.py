"""Sets that are loaded and unloaded by name at one Gateway are so at all, also at a new one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from app.errors import NotReadyError, SetStateError, UnknownModelError
from app.graph import hub_link
from app.serve import sets
from app.serve.gateway import Assembly, assemble
from app.serve.replica import Hub
from app.serve.sets import SetBook, SetChanges, SharedSets
from app.settings import Settings
from models.errors import ModelSetError
from tests.support.several_sets import FIRST, SECOND, THIRD, three_sets
from tests.support.tiny_versions import LocalHandle

ORIGIN = "two sets"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return three_sets(tmp_path)


class Gateway:
    """A Gateway's sets, and its link with the deployment."""

    def __init__(self, settings: Settings, handle: LocalHandle, origin: str = ORIGIN) -> None:
        self.graph: Assembly = assemble(settings)
        self.sets = SharedSets(handle, self.graph.sets, origin)

    @property
    def names(self) -> list[str]:
        return list(self.graph.service.sets)


@pytest.fixture
def handle(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> LocalHandle:
    monkeypatch.setattr("app.serve.replica.start_replica", lambda _: None)
    return LocalHandle(Hub(settings, SetBook(SetChanges(ORIGIN))))


@pytest.fixture
async def start(settings, handle, monkeypatch) -> AsyncIterator[Callable[[], Gateway]]:
    monkeypatch.setattr(hub_link, "EXCHANGE_EVERY_S", 0.02)
    gateways: list[Gateway] = []

    def gateway(origin: str = ORIGIN) -> Gateway:
        gateways.append(Gateway(settings, handle, origin))
        return gateways[-1]

    yield gateway
    for task in (each.sets._task for each in gateways if each.sets._task is not None):
        task.cancel()


@pytest.fixture
async def two(start: Callable[[], Gateway]) -> tuple[Gateway, Gateway]:
    first, second = start(), start()
    await first.sets.start()
    await second.sets.start()
    return first, second


async def test_an_answer_means_that_all_gateways_serve_it(two, start) -> None:
    """One that starts later follows before it is asked."""
    first, second = two
    await first.sets.unload(SECOND)
    assert first.names == second.names == [FIRST]
    await second.sets.load(SECOND)
    await second.sets.load(THIRD)
    assert first.names == second.names == [FIRST, SECOND, THIRD]
    await first.sets.unload(SECOND)
    third = start()
    assert third.names == [FIRST, SECOND]
    await third.sets.start()
    assert third.names == [FIRST, THIRD]


async def test_a_deployment_that_begins_anew_learns_the_sets_from_the_gateways(
    two, handle, start, settings
):
    await two[0].sets.unload(SECOND)
    handle.deployment = Hub(settings, SetBook(SetChanges(ORIGIN)))
    await two[1].sets._exchange()
    third = start()
    await third.sets.start()
    assert third.names == [FIRST]
    await third.sets.load(SECOND)  # newer than what the others know
    assert [gateway.names for gateway in (*two, third)] == [[FIRST, SECOND]] * 3


async def test_a_service_of_other_settings_keeps_its_sets(two, start):
    await two[0].sets.unload(SECOND)
    other = start("other settings")
    await other.sets.start()
    assert other.names == [FIRST, SECOND]
    assert await two[0].sets.call("revisions") == [1, 1]


async def test_what_is_refused_here_changes_nothing_elsewhere(two):
    first, second = two
    with pytest.raises(SetStateError, match="is the default set"):
        await first.sets.unload(FIRST)
    with pytest.raises(UnknownModelError):
        await first.sets.load("nobody")
    await second.sets._exchange()
    assert second.sets._facts.by_set == {}
    assert first.names == second.names == [FIRST, SECOND]


@pytest.mark.parametrize("error", [ModelSetError("a file is missing"), MemoryError()], ids=type)
async def test_a_gateway_that_cannot_follow_is_counted_and_tries_again(two, monkeypatch, error):
    first, second = two
    monkeypatch.setattr(sets, "EVERYWHERE_S", 0.5)
    monkeypatch.setattr(sets, "AGAIN_AFTER_S", 0.02)
    load, is_broken = second.graph.sets.load, True

    async def loaded(name: str) -> None:
        if is_broken:
            raise error
        await load(name)

    monkeypatch.setattr(second.graph.sets, "load", loaded)
    with pytest.raises(NotReadyError, match=f"1 of 2 Gateways do not follow for {THIRD} yet"):
        await first.sets.load(THIRD)
    assert THIRD in first.names
    is_broken = False
    async with asyncio.timeout(30):
        while THIRD not in second.names:
            await asyncio.sleep(0.01)
    monkeypatch.setattr(sets, "EVERYWHERE_S", 30)  # a busy machine takes its time
    await first.sets.load(THIRD)


async def test_a_deployment_that_is_away_is_said_and_the_sets_are_served(two, handle):
    first, second = two
    away, handle.deployment = handle.deployment, None
    with pytest.raises(NotReadyError):
        await first.sets.unload(SECOND)
    assert second.names == [FIRST, SECOND]
    handle.deployment = away
    await first.sets.unload(SECOND)  # again
    assert first.names == second.names == [FIRST]


async def test_a_caller_that_goes_leaves_the_change_to_be_made(two):
    first, second = two
    caller = asyncio.create_task(first.sets.load(THIRD))
    await asyncio.sleep(0)
    caller.cancel()
    async with asyncio.timeout(30):
        while THIRD not in first.names or THIRD not in second.names:
            await asyncio.sleep(0.01)
