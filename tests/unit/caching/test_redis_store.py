"""The shared store, whatever Redis does: right or nothing, soon, and never an error."""

import asyncio
import logging
from collections import Counter

import numpy as np
import pytest

from app.caching.redis_store import LIFE_S, MAX_UNWRITTEN, READ_S, RedisStore
from app.caching.values import RowsFormat
from app.setting_values import RedisAddress
from tests.support.fake_redis import FakeRedis
from tests.support.virtual_loop import run_virtually

ADDRESS = RedisAddress.of("redis://user:s3cret@cache:6379/1")
FORM = RowsFormat("0123456789ab", (2,), 3)
ROWS = np.array([[0.1, 0.8, 0.1], [0.2, 0.5, 0.3]], np.float32)
KEYS = [bytes([number]) * 32 for number in range(4)]


class Shared:
    """A store, its Redis, and what it told of each image."""

    def __init__(self) -> None:
        self.redis, self.told = FakeRedis(), Counter[str]()
        self.store = RedisStore(ADDRESS, FORM, "tandem:", self._count, lambda _: self.redis)

    def _count(self, result: str, number: int) -> None:
        self.told[result] += number

    async def write(self, *keys: bytes) -> None:
        for key in keys:
            self.store.write(key, ROWS)
        await self.store.written()


@pytest.fixture
def shared() -> Shared:
    return Shared()


async def test_what_was_written_is_read(shared):
    await shared.write(*KEYS[:2])
    first, absent, second = await shared.store.read([KEYS[0], KEYS[2], KEYS[1]])
    assert absent is None
    for rows in (first, second):
        assert rows is not None
        assert rows.tobytes() == ROWS.tobytes()
    assert shared.told == {"written": 2, "hit": 2, "miss": 1}
    assert shared.redis.num_writes == 1  # both in one call
    assert set(shared.redis.lives_s.values()) == {LIFE_S}


@pytest.mark.parametrize(
    "poison",
    [b"", b"x", bytes(len(FORM.pack(KEYS[1], ROWS))), FORM.pack(KEYS[1], ROWS), "a text", 7],
)
async def test_a_poisoned_value_is_a_miss(shared, poison):
    await shared.write(KEYS[0])
    (name,) = shared.redis.values
    shared.redis.values[name] = poison
    assert await shared.store.read(KEYS[:1]) == [None]
    assert shared.told["bad"] == 1
    await shared.write(KEYS[0])  # and it is written anew
    assert (await shared.store.read(KEYS[:1]))[0] is not None


@pytest.mark.parametrize("error", [ConnectionError("refused"), OSError(), ValueError("a reply")])
async def test_gone_it_is_left_alone_and_told_of_once(shared, error, caplog):
    shared.redis.raises = error
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert await shared.store.read(KEYS[:2]) == [None, None]
    assert shared.redis.num_reads == 1
    assert shared.told == {"failed": 2, "skipped": 8}
    (record,) = caplog.records
    assert "redis://cache:6379/1" in record.getMessage()
    assert "s3cret" not in record.getMessage()


def test_back_again_it_is_used_again(shared):
    async def play() -> None:
        await shared.write(KEYS[0])
        shared.redis.raises = ConnectionError("gone")
        await shared.store.read(KEYS[:1])
        shared.redis.raises = None
        shared.store._reads._clock = asyncio.get_running_loop().time
        shared.store._reads._next_trial = 5.0
        assert await shared.store.read(KEYS[:1]) == [None]
        await asyncio.sleep(5)
        assert (await shared.store.read(KEYS[:1]))[0] is not None

    run_virtually(play())


def test_slow_it_costs_a_request_no_more_than_its_limit(shared):
    async def play() -> float:
        shared.redis.gate = asyncio.Event()
        began = asyncio.get_running_loop().time()
        reads = [shared.store.read(KEYS[:1]) for _ in range(20)]
        assert await asyncio.gather(*reads) == [[None]] * 20
        taken = asyncio.get_running_loop().time() - began
        assert await shared.store.read(KEYS[:1]) == [None]  # the circuit is open: at once
        return taken

    assert run_virtually(play()) == pytest.approx(READ_S)
    assert shared.told == {"failed": 20, "skipped": 1}


async def test_full_it_is_still_read(shared):
    await shared.write(KEYS[0])
    shared.redis.write_raises = RuntimeError("OOM command not allowed")
    await shared.write(KEYS[1])
    await shared.write(KEYS[2])
    assert shared.told["unwritten"] == 2
    assert shared.redis.num_writes == 2  # the second was not tried
    assert (await shared.store.read(KEYS[:1]))[0] is not None


async def test_what_waits_to_be_written_is_bounded(shared):
    shared.redis.gate = asyncio.Event()
    for number in range(2 * MAX_UNWRITTEN):
        shared.store.write(number.to_bytes(32, "big"), ROWS)
        if number == 10:
            await asyncio.sleep(0)
    assert len(shared.store._unwritten) <= MAX_UNWRITTEN
    shared.redis.gate.set()
    await shared.store.written()
    assert shared.told["written"] + shared.told["unwritten"] == 2 * MAX_UNWRITTEN
    assert len(shared.redis.values) == shared.told["written"]


async def test_a_request_that_is_cancelled_is_no_failure_of_redis(shared):
    shared.redis.gate = asyncio.Event()
    read = asyncio.create_task(shared.store.read(KEYS[:1]))
    await asyncio.sleep(0)
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert not shared.store._reads.is_open
