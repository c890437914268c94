"""The cache of one process: answers, and computations under way, so that one image runs once."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal

from app.caching.redis_store import RedisStore
from app.caching.values import Outcome, Rows
from app.messages import Fault
from app.queueing.priority import Lane

CACHE_CONTROL = "cache-control"
# use: read and store; renew: store, do not read (no-cache); off: neither (no-store).
CacheUse = Literal["use", "renew", "off"]
# Memory of stored rows besides their values: key, array, tuple, place in the table
# (tests/unit/caching/test_memory.py).
ENTRY_BYTES = 512


class RowStore:
    """Rows by key, in at most ``max_bytes`` with their overhead; evicts the least recently used."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes, self.num_evicted = max_bytes, 0, 0
        self._rows: OrderedDict[bytes, Rows] = OrderedDict()  # the most recently used last

    def get(self, key: bytes) -> Rows | None:
        if (rows := self._rows.get(key)) is not None:
            self._rows.move_to_end(key)
        return rows

    def put(self, key: bytes, rows: Rows) -> None:
        """Store rows in place of earlier ones; rows larger than the whole store are not stored."""
        if (old := self._rows.pop(key, None)) is not None:
            self.num_bytes -= old.nbytes + ENTRY_BYTES
        if (num_bytes := rows.nbytes + ENTRY_BYTES) > self.max_bytes:
            return
        self._rows[key] = rows
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            _, evicted = self._rows.popitem(last=False)
            self.num_bytes -= evicted.nbytes + ENTRY_BYTES
            self.num_evicted += 1


class ImageFlight:
    """A computation that requests share. ``value`` is its result once it has ended, or None.

    If ``value`` is None, ``was_answered`` says whether the computing request still got an answer,
    which holds for it alone (a member had too little time). Otherwise it failed or was cancelled,
    and another request should compute. ``ended`` wakes all waiters, in the order of their arrival.
    """

    __slots__ = ("ended", "key", "lane", "value", "was_answered")

    def __init__(self, key: bytes, lane: Lane) -> None:
        self.key, self.lane = key, lane
        self.value: Outcome | Fault | None = None
        self.was_answered = False
        self.ended = asyncio.Event()


class ResponseCache:
    """Keeps rows by key, at most ``max_bytes`` of memory; for one event loop.

    Rows that are missing are looked up in ``shared``, if there is one, and new rows are written
    there. ``store`` is memory shared with other caches, in place of an own one of ``max_bytes``.
    """

    def __init__(
        self,
        max_bytes: int,
        shared: RedisStore | None = None,
        store: RowStore | None = None,
    ) -> None:
        self._shared = shared
        self._store = RowStore(max_bytes) if store is None else store
        self._flights: dict[bytes, ImageFlight] = {}  # the computations under way

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    def take_evicted(self) -> int:
        """Return the number of images evicted since the last call."""
        number, self._store.num_evicted = self._store.num_evicted, 0
        return number

    def read(self, key: bytes) -> Rows | None:
        return self._store.get(key)

    def join(self, key: bytes, lane: Lane) -> tuple[ImageFlight, bool]:
        """Return the computation of a key's rows, and whether it is new.

        The caller must run a new one, and :meth:`end` it in every case. A request in the lane
        ``interactive`` does not wait for a computation in ``bulk``, which interactive requests
        overtake. It computes itself, and later requests wait for it.
        """
        under_way = self._flights.get(key)
        if under_way is not None and (under_way.lane == "interactive" or lane == "bulk"):
            return under_way, False
        own = self._flights[key] = ImageFlight(key, lane)
        return own, True

    def keep(self, key: bytes, rows: Rows) -> None:
        """Keep an image's rows, which must not be changed afterwards."""
        self._store.put(key, rows)
        if self._shared is not None:
            self._shared.write(key, rows)

    async def fetch(self, flights: Mapping[int, ImageFlight | None]) -> dict[int, Rows]:
        """Return rows from the shared store for computations of the caller, by their numbers.

        It ends the computations for which there are rows. It skips entries that are None.
        """
        wanted = {number: flight for number, flight in flights.items() if flight is not None}
        if self._shared is None or not wanted:
            return {}
        shared = await self._shared.read([flight.key for flight in wanted.values()])
        fetched = {}
        for (number, flight), rows in zip(wanted.items(), shared, strict=True):
            if rows is not None:
                fetched[number] = rows
                self._store.put(flight.key, rows)
                self.end(flight, Outcome(rows))
        return fetched

    def end(
        self, flight: ImageFlight, outcome: Outcome | Fault | None = None, *, answered: bool = False
    ) -> None:
        """End a computation that the caller ran, and notify the requests that wait for it.

        Args:
            flight: the computation; if it has ended, nothing happens.
            outcome: its result; None: there is no result that other requests may use.
            answered: without an outcome, whether the caller's request was answered. If so, all
               waiting requests compute for themselves; otherwise the first of them takes over.

        """
        if flight.ended.is_set():
            return
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        flight.value, flight.was_answered = outcome, answered
        flight.ended.set()


def cache_use_of(cache_control: str | None) -> CacheUse:
    """Return how a client allows the cache to be used; unknown directives are ignored."""
    if not cache_control:
        return "use"
    parts = cache_control.lower().split(",")
    directives = {part.partition("=")[0].strip() for part in parts}
    if "no-store" in directives:
        return "off"
    return "renew" if "no-cache" in directives else "use"
