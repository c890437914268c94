"""Rows in Redis, shared by all Gateways; Redis is optional and may be slow, full or gone.

Nothing here raises, or waits longer than :data:`READ_S`. :class:`app.caching.values.RowsFormat`
checks the bytes from Redis, which are not trusted.
"""

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from app.caching.values import Rows, RowsFormat
from app.queueing.circuit_breaker import CircuitBreaker
from app.setting_values import RedisAddress

# For one look-up, with connecting. A busy Gateway's loop may itself be late by a tenth of this. A
# Redis that hangs delays the requests of one moment, and then one request now and then.
READ_S = 0.2
WRITE_S = 1.0
LIFE_S = 24 * 3600  # of a value; removes those of model sets that are no longer served
MAX_CONNECTIONS = 16
MAX_UNWRITTEN = 512  # images; further ones are not written while these wait
AT_ONCE = 64  # images in one command
logger = logging.getLogger("ray.serve")
# Called with the result of a look-up or write, and the number of images.
Observe = Callable[[str, int], None]


class RedisStore:
    """Reads and writes rows; for one event loop.

    ``prefix`` begins every key in Redis; it names the model set, for people who look or clean up.
    ``connect`` makes the client, so that tests can replace it.
    """

    def __init__(
        self,
        address: RedisAddress,
        form: RowsFormat,
        prefix: str,
        observe: Observe,
        connect: Callable[[RedisAddress], Any] | None = None,
    ) -> None:
        self._client = (connect or client_of)(address)
        self._address, self._form, self._prefix = address, form, prefix
        self._observe = observe
        self._reads, self._writes = CircuitBreaker(), CircuitBreaker()
        self._unwritten: deque[tuple[str, bytes]] = deque()  # names in Redis and values
        self._writing: asyncio.Task[None] | None = None

    async def read(self, keys: Sequence[bytes]) -> list[Rows | None]:
        """Return the rows of each key, in order; None for keys that are missing or damaged."""
        nothing: list[Rows | None] = [None] * len(keys)
        if not self._reads.allows():
            self._observe("skipped", len(keys))
            return nothing
        try:
            async with asyncio.timeout(READ_S):
                values = await self._client.mget([self._name(key) for key in keys])
        except Exception as error:
            self._observe("failed", len(keys))
            self._note_failure(self._reads, "read from", error)
            return nothing
        self._note_success(self._reads, "read from")
        return [self._checked(key, value) for key, value in zip(keys, values, strict=True)]

    def write(self, key: bytes, rows: Rows) -> None:
        """Queue rows to be written; returns at once."""
        if len(self._unwritten) >= MAX_UNWRITTEN:
            self._observe("unwritten", 1)
            return
        self._unwritten.append((self._name(key), self._form.pack(key, rows)))
        if self._writing is None or self._writing.done():
            # Without a request's context, so that its trace and deadline do not apply.
            loop = asyncio.get_running_loop()
            self._writing = loop.create_task(self._write_all(), context=contextvars.Context())

    async def written(self) -> None:
        """Return when all queued rows are written."""
        if self._writing is not None:
            await self._writing

    async def _write_all(self) -> None:
        while self._unwritten:
            number = min(AT_ONCE, len(self._unwritten))
            some = [self._unwritten.popleft() for _ in range(number)]
            result = "written" if await self._write(some) else "unwritten"
            self._observe(result, number)

    async def _write(self, some: Sequence[tuple[str, bytes]]) -> bool:
        if not self._writes.allows():
            return False
        try:
            async with asyncio.timeout(WRITE_S), self._client.pipeline(transaction=False) as calls:
                for name, value in some:
                    calls.set(name, value, ex=LIFE_S)
                await calls.execute()
        except Exception as error:
            self._note_failure(self._writes, "written to", error)
            return False
        self._note_success(self._writes, "written to")
        return True

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _checked(self, key: bytes, value: object) -> Rows | None:
        rows = self._form.read(key, value) if isinstance(value, bytes) else None
        result = "hit" if rows is not None else "miss" if value is None else "bad"
        self._observe(result, 1)
        return rows

    def _note_failure(self, breaker: CircuitBreaker, what: str, error: Exception) -> None:
        if breaker.failed():
            logger.warning(
                "the cache cannot be %s Redis at %s (%s: %s); images are computed as without it, "
                "and it is tried again now and then",
                what,
                self._address.shown,
                type(error).__name__,
                error,
            )

    def _note_success(self, breaker: CircuitBreaker, what: str) -> None:
        if breaker.succeeded():
            logger.info("the cache is %s Redis at %s again", what, self._address.shown)


def client_of(address: RedisAddress) -> Any:
    """Return a client that connects at its first use, and does not retry."""
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    pool = BlockingConnectionPool.from_url(
        address.url,
        max_connections=MAX_CONNECTIONS,
        timeout=READ_S,  # to get a free connection
        socket_connect_timeout=WRITE_S,
        socket_timeout=WRITE_S,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)
