"""A Redis in memory, as far as the cache's client is used: slow, full, broken or gone if told."""

import asyncio
from typing import Any, Self


class FakeRedis:
    """Keeps values by name. ``raises`` fails every call, ``gate`` holds them until it is set."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lives_s: dict[str, int] = {}
        self.raises: Exception | None = None
        self.write_raises: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.num_reads = self.num_writes = 0

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.raises is not None:
            raise self.raises

    async def mget(self, names: list[str]) -> list[bytes | None]:
        self.num_reads += 1
        await self._answer()
        return [self.values.get(name) for name in names]

    def pipeline(self, *, transaction: bool) -> "FakePipeline":
        assert not transaction
        return FakePipeline(self)


class FakePipeline:
    def __init__(self, redis: FakeRedis) -> None:
        self._redis = redis
        self._sets: list[tuple[str, bytes, int]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._sets.clear()

    def set(self, name: str, value: bytes, *, ex: int) -> None:
        self._sets.append((name, value, ex))

    async def execute(self) -> None:
        redis = self._redis
        redis.num_writes += 1
        await redis._answer()
        if redis.write_raises is not None:
            raise redis.write_raises
        for name, value, life_s in self._sets:
            redis.values[name], redis.lives_s[name] = value, life_s
