"""A queue of two priorities: interactive images first, bulk images without starvation.

A form of 64 files must not keep a single photo waiting. Interactive images go first; of every
``BULK_EVERY`` places one is for bulk images if any wait, so that neither lane starves.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Generic, Literal, Protocol, TypeVar

Lane = Literal["interactive", "bulk"]
LANES: tuple[Lane, ...] = ("interactive", "bulk")
BULK_EVERY = 8


class Entry(Protocol):
    """What waits in a lane: done() when nobody wants it any more."""

    def is_gone(self) -> bool:
        """Whether the caller went away."""


T = TypeVar("T", bound=Entry)


class LaneTurns:
    """Says whose lane is next: interactive, but for one turn of ``BULK_EVERY`` while bulk waits."""

    def __init__(self) -> None:
        self._since_bulk = 0  # interactive turns since bulk last had one

    def next(self, *, interactive: bool, bulk: bool) -> Lane:
        """Return whose turn it is; the arguments say in which lanes somebody waits."""
        if bulk and (not interactive or self._since_bulk >= BULK_EVERY - 1):
            return "bulk"
        return "interactive"

    def taken(self, lane: Lane) -> None:
        self._since_bulk = 0 if lane == "bulk" else self._since_bulk + 1


class PriorityQueue(Generic[T]):
    """A queue for each lane, in order of arrival."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, deque[T]] = {lane: deque() for lane in LANES}
        self._turns = LaneTurns()

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._lanes.values())

    def head(self, lane: Lane) -> T | None:
        """Return the first of a lane, which has waited longest in it; None if it is empty."""
        entries = self._lanes[lane]
        return entries[0] if entries else None

    def heads(self) -> list[T]:
        """Return the first of each lane that has one: nobody has waited longer than they."""
        return [entries[0] for entries in self._lanes.values() if entries]

    def num_ahead(self, lane: Lane) -> int:
        """Return how many go before one that comes now; an interactive one passes the bulk."""
        return len(self._lanes["interactive"]) if lane == "interactive" else len(self)

    def extend(self, entries: Iterable[T], lane: Lane) -> None:
        self._lanes[lane].extend(entries)

    def pop(self) -> T:
        """Take the entry whose turn it is."""
        waiting = {lane: bool(entries) for lane, entries in self._lanes.items()}
        lane = self._turns.next(**waiting)
        self._turns.taken(lane)
        return self._lanes[lane].popleft()

    def forget_the_gone(self) -> None:
        """Free the places of callers that went away."""
        if any(entry.is_gone() for entry in self):
            for lane, entries in self._lanes.items():
                self._lanes[lane] = deque(entry for entry in entries if not entry.is_gone())
