"""Computations under way that several requests may wait for: one image is computed once."""

import asyncio
from typing import Generic, NamedTuple, TypeVar

from app.queueing.priority import Lane

V = TypeVar("V")


class Flight(Generic[V]):
    """A computation that requests share. ``value`` is its result once it has ended, or None.

    If ``value`` is None, ``was_answered`` says whether the computing request still got an answer,
    which holds for it alone (a member had too little time). Otherwise it failed or was cancelled,
    and another request should compute.
    """

    __slots__ = ("_ended", "key", "lane", "value", "was_answered")

    def __init__(self, key: bytes, lane: Lane) -> None:
        self.key, self.lane = key, lane
        self.value: V | None = None
        self.was_answered = False
        self._ended = asyncio.Event()

    async def wait(self) -> None:
        """Return when the computation has ended; cancelling a waiter affects no other waiter."""
        await self._ended.wait()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def end(self, value: V | None, *, was_answered: bool) -> None:
        """Wake all waiters, in the order of their arrival."""
        self.value, self.was_answered = value, was_answered
        self._ended.set()


class Joined(NamedTuple, Generic[V]):
    """A computation, and whether the caller has to run it."""

    flight: Flight[V]
    is_own: bool


class Flights(Generic[V]):
    """The computations under way, by key; for one event loop.

    A request in the lane ``interactive`` does not wait for a computation in ``bulk``, which
    interactive requests overtake. It computes itself, and later requests wait for it.
    """

    def __init__(self) -> None:
        self._by_key: dict[bytes, Flight[V]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def join(self, key: bytes, lane: Lane) -> Joined[V]:
        """Return the computation under way for a key, or a new one that the caller has to run.

        Whoever gets a new one must :meth:`end` it, in every case.
        """
        under_way = self._by_key.get(key)
        if under_way is not None and (under_way.lane == "interactive" or lane == "bulk"):
            return Joined(under_way, False)
        own: Flight[V] = Flight(key, lane)
        self._by_key[key] = own
        return Joined(own, True)

    def end(self, flight: Flight[V], value: V | None = None, *, was_answered: bool = False) -> None:
        """End a computation; does nothing if it has ended already."""
        if flight.has_ended:
            return
        if self._by_key.get(flight.key) is flight:
            del self._by_key[flight.key]
        flight.end(value, was_answered=was_answered)
