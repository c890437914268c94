"""Computations under way that several requests may wait for: one image is computed once."""

import asyncio
from typing import Generic, NamedTuple, TypeVar

from app.queueing.priority import Lane

V = TypeVar("V")


class Flight(Generic[V]):
    """One computation. ``value`` is what came of it, once it has ended; None, if nothing to share.

    ``was_answered`` tells, without a value, whether its request got an answer that is its own only
    (a member had too little time). Else it failed or was cancelled, and another should try.
    """

    __slots__ = ("_ended", "key", "lane", "value", "was_answered")

    def __init__(self, key: bytes, lane: Lane) -> None:
        self.key, self.lane = key, lane
        self.value: V | None = None
        self.was_answered = False
        self._ended = asyncio.Event()

    async def wait(self) -> None:
        """Return when it has ended; a waiter that is cancelled ends nobody else's wait."""
        await self._ended.wait()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def end(self, value: V | None, *, was_answered: bool) -> None:
        """Wake all that wait, in the order in which they came."""
        self.value, self.was_answered = value, was_answered
        self._ended.set()


class Joined(NamedTuple, Generic[V]):
    """A computation, and whether it is the caller that has to do it."""

    flight: Flight[V]
    is_own: bool


class Flights(Generic[V]):
    """The computations under way, by key; for one event loop.

    A request of the lane ``interactive`` does not wait for one of ``bulk``, behind which others may
    have been let in: it computes by itself, and those that come after it wait for it.
    """

    def __init__(self) -> None:
        self._by_key: dict[bytes, Flight[V]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def join(self, key: bytes, lane: Lane) -> Joined[V]:
        """Return the computation of a key that is under way, or a new one for the caller to do.

        Who begins one must :meth:`end` it, whatever happens.
        """
        under_way = self._by_key.get(key)
        if under_way is not None and (under_way.lane == "interactive" or lane == "bulk"):
            return Joined(under_way, False)
        own: Flight[V] = Flight(key, lane)
        self._by_key[key] = own
        return Joined(own, True)

    def end(self, flight: Flight[V], value: V | None = None, *, was_answered: bool = False) -> None:
        """End a computation; of one that has ended already nothing changes."""
        if flight.has_ended:
            return
        if self._by_key.get(flight.key) is flight:
            del self._by_key[flight.key]
        flight.end(value, was_answered=was_answered)
