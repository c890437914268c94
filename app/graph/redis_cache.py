"""Rows of answers in Redis, shared by all Gateways: their keys, their bytes, and the store.

Redis is optional and may be slow, full or gone: nothing here raises, or waits longer than
:data:`READ_S`. Others can write to it too, so the bytes from it are checked, and never executed. A
key is a hash of the file's bytes and of everything else that its answer depends on.
"""

import asyncio
import contextvars
import hashlib
import logging
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, get_args

import numpy as np

from app.queueing.overload import CircuitBreaker
from app.setting_values import RedisAddress
from app.settings import Settings
from models.ensemble import PlanName, Probabilities
from models.model_set import ModelSet

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
# A row per member in the ensemble's order: (M, C) float32. Their average is computed again, which
# saves memory for other images. With an operator's own combine its result follows: (M + 1, C). If
# a fast plan skipped members, they have no row, and the order is the plan's.
Rows = Probabilities
MAGIC = b"TDMR"
CHECKSUM_BYTES = 16
# magic, format, rows, classes, the model set's fingerprint, checksum
VALUE_HEAD = struct.Struct(f"<4sHHI16s{CHECKSUM_BYTES}s")
VALUE = np.dtype("<f4")
MAX_VALUE = 1.001  # an operator's own combine may be off so far
FORMAT = 1  # version of keys and values; raise it when equal bytes would get another answer
KEY_BYTES = 32
# BLAKE2b hashes 1 MiB in about 1 ms (python -m timeit -s "import hashlib; d = bytes(2**20)"
# "hashlib.blake2b(d)"). Up to this size, hashing blocks the loop no longer than a hit may cost.
HASHED_ON_LOOP_BYTES = 256 * 2**10
# They compute pixels and probabilities; "" for what is not installed.
LIBRARIES = ("opencv-python-headless", "pillow", "pillow-heif", "openvino", "onnxruntime")


class RowsFormat:
    """Packs and reads the rows of one model set: (rows, classes) float32, in 0..1.

    ``nums_rows`` are the allowed numbers of rows of an image.
    """

    def __init__(self, fingerprint: str, nums_rows: Sequence[int], num_classes: int) -> None:
        self._nums_rows, self._num_classes = nums_rows, num_classes
        self._fingerprint = fingerprint.encode("ascii").ljust(16, b"\0")

    def pack(self, key: bytes, rows: Rows) -> bytes:
        """Encode the rows of the image with this key."""
        body = rows.astype(VALUE, copy=False).tobytes()
        return VALUE_HEAD.pack(*self._start(len(rows)), _checksum(key, body)) + body

    def read(self, key: bytes, data: bytes) -> Rows | None:
        """Decode rows; None if the bytes were not packed for this key and model set."""
        body = data[VALUE_HEAD.size :]
        num_rows, rest = divmod(len(body), VALUE.itemsize * self._num_classes)
        if rest or num_rows not in self._nums_rows:
            return None
        *start, checksum = VALUE_HEAD.unpack_from(data)
        if tuple(start) != self._start(num_rows) or checksum != _checksum(key, body):
            return None
        # A copy, so that the store counts the memory that it keeps.
        rows: Rows = np.frombuffer(body, VALUE).reshape(num_rows, -1).astype(np.float32)
        # Whoever can write there can write checksums too, so the range is checked as well.
        is_sound = bool(((rows >= 0) & (rows <= MAX_VALUE)).all())  # False for NaN
        return rows if is_sound else None

    def _start(self, num_rows: int) -> tuple[object, ...]:
        return MAGIC, FORMAT, num_rows, self._num_classes, self._fingerprint


class RedisStore:
    """Reads and writes rows; for one event loop.

    ``prefix`` begins every key in Redis. It has the model set's name, so that people can find and
    remove its keys.
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
            text = (
                "the cache cannot be %s Redis at %s (%s: %s); images are computed as without it, "
                "and it is tried again now and then"
            )
            logger.warning(text, what, self._address.shown, type(error).__name__, error)

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


class Outcome(NamedTuple):
    """An image's outcome: the rows of the members that answered, and why others did not."""

    rows: Rows
    missing: Mapping[str, str] = {}


def _checksum(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=CHECKSUM_BYTES, key=key).digest()


class ImageKeys:
    """Makes keys of 32 bytes; another model set, precision or limit gives other keys.

    ``functions`` are the identities of the operator's own functions, if any.
    """

    def __init__(
        self, settings: Settings, model_set: ModelSet, functions: Sequence[str] = ()
    ) -> None:
        self.fingerprint = model_set.fingerprint(settings.served_precision)
        context = (
            FORMAT,
            model_set.name,
            self.fingerprint,
            settings.served_precision,
            settings.max_pixels,  # decides which images have answers
            settings.max_full_pixels,
            *(["convert"] if settings.icc_profiles == "convert" else []),
            *map(_version_of, LIBRARIES),
            *functions,
        )
        self._contexts = {  # the plan decides which members answer
            plan: hashlib.blake2b(repr((context, plan)).encode(), digest_size=64).digest()
            for plan in get_args(PlanName)
        }

    async def of(self, files: Sequence[bytes], plan: PlanName = "full") -> list[bytes]:
        """Return a key per file; many bytes are hashed on a thread, to keep the loop free."""
        if sum(map(len, files)) <= HASHED_ON_LOOP_BYTES:
            return [self.key(data, plan) for data in files]
        return await asyncio.to_thread(lambda: [self.key(data, plan) for data in files])

    def key(self, data: bytes, plan: PlanName = "full") -> bytes:
        context = self._contexts[plan]
        return hashlib.blake2b(data, digest_size=KEY_BYTES, key=context).digest()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # installed from another package
        return ""
