"""A bounded store with the eviction policy S3-FIFO, which resists scans.

J. Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023. A new value enters a
small queue, with a tenth of the bytes. Only values that are requested again meanwhile move to the
main queue. Keys of values that left the small queue are remembered for a while, and enter the main
queue directly when they return. So images that are seen once displace only each other.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")
SMALL_SHARE = 0.1  # the small queue's share of the bytes, once the store is full
GHOST_SHARE = 0.1  # the remembered keys' largest share of the bytes
MAX_HITS = 3  # counted per entry; how often it may pass through the main queue
# Memory of an entry besides its value (key, object, places in queue and table), and of a remembered
# key (tests/unit/caching/test_memory.py).
ENTRY_BYTES = 512
GHOST_BYTES = 288


class _Entry(Generic[V]):
    __slots__ = ("num_bytes", "num_hits", "value")

    def __init__(self, value: V, num_bytes: int) -> None:
        self.value, self.num_bytes, self.num_hits = value, num_bytes, 0


class S3Fifo(Generic[V]):
    """Values by key, in at most ``max_bytes`` with their overhead."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_evicted = max_bytes, 0
        self._small: OrderedDict[bytes, _Entry[V]] = OrderedDict()
        self._main: OrderedDict[bytes, _Entry[V]] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()  # keys that left the small queue
        self._small_bytes = self._main_bytes = 0

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: bytes) -> bool:
        return key in self._small or key in self._main

    @property
    def num_bytes(self) -> int:
        """The memory in use, remembered keys included."""
        return self._small_bytes + self._main_bytes + GHOST_BYTES * len(self._ghosts)

    def get(self, key: bytes) -> V | None:
        entry = self._main.get(key) or self._small.get(key)
        if entry is None:
            return None
        entry.num_hits = min(entry.num_hits + 1, MAX_HITS)
        return entry.value

    def put(self, key: bytes, value: V, num_bytes: int) -> None:
        """Store a value of ``num_bytes``, replacing an earlier one; evicts others if needed.

        A value larger than the whole store is not stored.
        """
        is_known = self._remove(key)
        entry = _Entry(value, num_bytes + ENTRY_BYTES)
        if entry.num_bytes > self.max_bytes:
            return
        while self.num_bytes + entry.num_bytes > self.max_bytes:
            self._evict()
        if is_known:
            self._main[key] = entry
            self._main_bytes += entry.num_bytes
        else:
            self._small[key] = entry
            self._small_bytes += entry.num_bytes

    def _remove(self, key: bytes) -> bool:
        """Remove a key; return whether it belongs in the main queue."""
        if (entry := self._small.pop(key, None)) is not None:
            self._small_bytes -= entry.num_bytes
            return entry.num_hits > 0
        if (entry := self._main.pop(key, None)) is not None:
            self._main_bytes -= entry.num_bytes
            return True
        is_ghost = key in self._ghosts
        self._ghosts.pop(key, None)
        return is_ghost

    def _evict(self) -> None:
        """Take a step towards more room: move, forget or evict an entry."""
        if self._small and (not self._main or self._small_bytes >= SMALL_SHARE * self.max_bytes):
            self._step_small()
        elif self._main:
            self._step_main()
        self._forget()

    def _step_small(self) -> None:
        key, entry = self._small.popitem(last=False)
        self._small_bytes -= entry.num_bytes
        if entry.num_hits:
            entry.num_hits = 0
            self._main[key] = entry
            self._main_bytes += entry.num_bytes
        else:
            self._ghosts[key] = None
            self.num_evicted += 1

    def _step_main(self) -> None:
        key, entry = self._main.popitem(last=False)
        if entry.num_hits:
            entry.num_hits -= 1
            self._main[key] = entry
        else:
            self._main_bytes -= entry.num_bytes
            self.num_evicted += 1

    def _forget(self) -> None:
        """Limit the remembered keys to the number of entries, and to their share of the bytes."""
        most = min(len(self), int(GHOST_SHARE * self.max_bytes) // GHOST_BYTES)
        while len(self._ghosts) > most:
            self._ghosts.popitem(last=False)
