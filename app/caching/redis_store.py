"""The rows that all Gateways share, in Redis: an optional help that may be slow, full or gone.

Nothing here raises or waits for longer than :data:`READ_S`. What Redis returns is read by
:class:`app.caching.values.RowsFormat`, which takes it for no more than bytes.
"""

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from app.caching.values import Rows, RowsFormat
from app.queueing.circuit_breaker import CircuitBreaker
from app.setting_values import RedisAddress

# For one look, connecting included. A busy Gateway's loop may itself be late by a tenth of this; a
# Redis that hangs costs it the requests of one moment, then one request now and then.
READ_S = 0.2
WRITE_S = 1.0
LIFE_S = 24 * 3600  # of a value; those of model sets that are no longer served go by it
MAX_CONNECTIONS = 16
MAX_UNWRITTEN = 512  # images; what comes while so many wait is not written
AT_ONCE = 64  # images in one call
logger = logging.getLogger("ray.serve")
# Told how many images had which result of a look or a write.
Observe = Callable[[str, int], None]


class Unwritten(NamedTuple):
    """A value that is still to be written."""

    name: str
    value: bytes


class RedisStore:
    """Reads and writes rows; for one event loop.

    Args:
        address: where Redis is.
        form: packs rows, and checks what comes back.
        prefix: of every key there; it names the model set, for those who look or clean up.
        observe: is told what came of each image.
        connect: makes the client; tests give their own.

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
        self._unwritten: deque[Unwritten] = deque()
        self._writing: asyncio.Task[None] | None = None

    async def read(self, keys: Sequence[bytes]) -> list[Rows | None]:
        """Return the rows of each key that is there; of one that is not, or is damaged, None."""
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
        """Write rows later; nobody waits for it."""
        if len(self._unwritten) >= MAX_UNWRITTEN:
            self._observe("unwritten", 1)
            return
        self._unwritten.append(Unwritten(self._name(key), self._form.pack(key, rows)))
        if self._writing is None or self._writing.done():
            # Of no request: its trace and its deadline are not this task's.
            loop = asyncio.get_running_loop()
            self._writing = loop.create_task(self._write_all(), context=contextvars.Context())

    async def written(self) -> None:
        """Return when nothing is left to write."""
        if self._writing is not None:
            await self._writing

    async def _write_all(self) -> None:
        while self._unwritten:
            number = min(AT_ONCE, len(self._unwritten))
            some = [self._unwritten.popleft() for _ in range(number)]
            result = "written" if await self._write(some) else "unwritten"
            self._observe(result, number)

    async def _write(self, some: Sequence[Unwritten]) -> bool:
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
    """Return a client that connects when it is first used, and never tries twice."""
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    pool = BlockingConnectionPool.from_url(
        address.url,
        max_connections=MAX_CONNECTIONS,
        timeout=READ_S,  # for a free connection
        socket_connect_timeout=WRITE_S,
        socket_timeout=WRITE_S,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)
