"""Clients that hang up while their answer is made."""

import asyncio

import pytest

from app.errors import ClientGoneError
from app.http.disconnect import WATCHED_AFTER_S, WatchedRequest


class Channel:
    """ASGI's receive as a server has it: after the body nothing until the client has gone."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self._has_body = True

    async def receive(self) -> dict:
        if self._has_body:
            self._has_body = False
            return {"type": "http.request", "body": b"image"}
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def answer(channel: Channel, done: asyncio.Event) -> str:
    with WatchedRequest(channel.receive) as watched:
        assert (await watched())["body"] == b"image"
        await done.wait()
    return "answered"


async def test_a_client_that_stays_gets_its_answer():
    channel, done = Channel(), asyncio.Event()
    task = asyncio.create_task(answer(channel, done))
    await asyncio.sleep(2 * WATCHED_AFTER_S)  # it is watched
    assert not task.done()
    done.set()
    assert await task == "answered"


async def test_a_client_that_hangs_up_ends_its_request_and_no_other():
    done = asyncio.Event()
    stays, goes = Channel(), Channel()
    staying = asyncio.create_task(answer(stays, done))
    going = asyncio.create_task(answer(goes, done))
    goes.gone.set()
    async with asyncio.timeout(10):
        with pytest.raises(ClientGoneError):
            await going
    done.set()
    assert await staying == "answered"


async def test_what_ended_before_is_not_cancelled():
    channel, done = Channel(), asyncio.Event()
    done.set()
    assert await answer(channel, done) == "answered"
    channel.gone.set()
    await asyncio.sleep(2 * WATCHED_AFTER_S)  # cancelled, this would raise


async def test_a_client_that_hangs_up_later_ends_its_request():
    channel, done = Channel(), asyncio.Event()
    task = asyncio.create_task(answer(channel, done))
    await asyncio.sleep(2 * WATCHED_AFTER_S)  # it is watched
    channel.gone.set()
    async with asyncio.timeout(10):
        with pytest.raises(ClientGoneError):
            await task


async def test_what_ends_while_it_is_watched_leaves_nothing_that_waits():
    channel, done = Channel(), asyncio.Event()
    task = asyncio.create_task(answer(channel, done))
    await asyncio.sleep(2 * WATCHED_AFTER_S)
    done.set()
    assert await task == "answered"
    assert not channel.gone._waiters
    channel.gone.set()
    await asyncio.sleep(0)  # cancelled, this would raise


async def test_a_cancellation_from_elsewhere_stays_one():
    channel, done = Channel(), asyncio.Event()
    task = asyncio.create_task(answer(channel, done))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_while_its_body_still_comes_a_request_is_not_looked_at():
    """A disconnect is the reader's to see then: the watch would take a chunk of the body."""
    messages = [b"first", b"last"]

    async def receive() -> dict:
        return {"type": "http.request", "body": messages.pop(0), "more_body": bool(messages)}

    with WatchedRequest(receive) as watched:
        await watched()
        await asyncio.sleep(2 * WATCHED_AFTER_S)
        assert messages == [b"last"]
        assert not (await watched())["more_body"]
