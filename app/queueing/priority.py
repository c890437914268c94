"""A queue of two priorities: interactive images first, bulk images without starvation.

A form of 64 files must not keep a single photo waiting. Interactive images go first; of every
``BULK_EVERY`` places one is for bulk images if any wait, so that neither lane starves.
"""

from collections import deque
from collections.abc import Iterable, Iterator
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
        """Note that a lane had its turn."""
        self._since_bulk = 0 if lane == "bulk" else self._since_bulk + 1


class PriorityQueue(Generic[T]):
    """Two queues, each in order of arrival."""

    def __init__(self) -> None:
        self._interactive: deque[T] = deque()
        self._bulk: deque[T] = deque()
        self._turns = LaneTurns()

    def __len__(self) -> int:
        return len(self._interactive) + len(self._bulk)

    def __iter__(self) -> Iterator[T]:
        yield from self._interactive
        yield from self._bulk

    def head(self, lane: Lane) -> T | None:
        """Return the first of a lane, which has waited longest in it; None if it is empty."""
        entries = self._interactive if lane == "interactive" else self._bulk
        return entries[0] if entries else None

    def heads(self) -> list[T]:
        """Return the first of each lane that has one: nobody has waited longer than they."""
        return [lane[0] for lane in (self._interactive, self._bulk) if lane]

    def num_ahead(self, lane: Lane) -> int:
        """Return how many go before one that comes now; an interactive one passes the bulk."""
        return len(self._interactive) if lane == "interactive" else len(self)

    def extend(self, entries: Iterable[T], lane: Lane) -> None:
        """Let entries wait at the end of a lane."""
        (self._interactive if lane == "interactive" else self._bulk).extend(entries)

    def pop(self) -> T:
        """Take the entry whose turn it is."""
        interactive, bulk = self._interactive, self._bulk
        lane = self._turns.next(interactive=bool(interactive), bulk=bool(bulk))
        self._turns.taken(lane)
        return (interactive if lane == "interactive" else bulk).popleft()

    def forget_the_gone(self) -> None:
        """Free the places of callers that went away."""
        if any(entry.is_gone() for entry in self):
            self._interactive = deque(entry for entry in self._interactive if not entry.is_gone())
            self._bulk = deque(entry for entry in self._bulk if not entry.is_gone())
