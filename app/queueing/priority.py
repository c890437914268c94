"""A queue with three lanes: interactive, bulk and shadow.

A form of 64 files must not delay a single photo. So interactive images go first; every
``BULK_EVERY``-th turn is for bulk images if any wait, so that they do not starve. The images of the
shadow lane, which no client waits for, only get a turn while no others wait.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Generic, Literal, Protocol, TypeVar

Lane = Literal["interactive", "bulk", "shadow"]
LANES: tuple[Lane, ...] = ("interactive", "bulk")  # of images that clients wait for
SHADOW: Lane = "shadow"  # used within a process only
BULK_EVERY = 8


class Entry(Protocol):
    """An entry of a lane."""

    def is_gone(self) -> bool:
        """Whether nobody waits for the entry any more."""


T = TypeVar("T", bound=Entry)


class LaneTurns:
    """Chooses the next lane: interactive, and every ``BULK_EVERY``-th turn bulk, if any wait."""

    def __init__(self) -> None:
        self._since_bulk = 0  # interactive turns since bulk last had one

    def next(self, *, interactive: bool, bulk: bool) -> Lane:
        """Return the next lane; the arguments say in which lanes entries wait."""
        if bulk and (not interactive or self._since_bulk >= BULK_EVERY - 1):
            return "bulk"
        return "interactive"

    def taken(self, lane: Lane) -> None:
        self._since_bulk = 0 if lane == "bulk" else self._since_bulk + 1


class PriorityQueue(Generic[T]):
    """A queue for each lane, in order of arrival."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, deque[T]] = {lane: deque() for lane in (*LANES, SHADOW)}
        self._turns = LaneTurns()

    def __len__(self) -> int:
        """How many entries compete for the next turns; the shadow lane's only if no others wait."""
        return self.num_answered or len(self._lanes[SHADOW])

    @property
    def num_answered(self) -> int:
        """How many entries wait outside of the shadow lane."""
        return sum(len(self._lanes[lane]) for lane in LANES)

    @property
    def answered(self) -> Iterator[T]:
        """Those of :attr:`num_answered`."""
        return chain.from_iterable(self._lanes[lane] for lane in LANES)

    @property
    def is_shadow_only(self) -> bool:
        """Whether entries wait in the shadow lane and in no other."""
        return bool(self._lanes[SHADOW]) and not self.num_answered

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._lanes.values())

    def head(self, lane: Lane) -> T | None:
        """Return the oldest entry of a lane; None if the lane is empty."""
        entries = self._lanes[lane]
        return entries[0] if entries else None

    def heads(self) -> list[T]:
        """Return the oldest entry of each lane that is not empty."""
        return [entries[0] for entries in self._lanes.values() if entries]

    @property
    def num_interactive(self) -> int:
        return len(self._lanes["interactive"])

    def extend(self, entries: Iterable[T], lane: Lane) -> None:
        self._lanes[lane].extend(entries)

    def pop(self) -> T:
        if self.is_shadow_only:
            return self._lanes[SHADOW].popleft()
        lane = self._turns.next(**{lane: bool(self._lanes[lane]) for lane in LANES})
        self._turns.taken(lane)
        return self._lanes[lane].popleft()

    def forget_the_gone(self) -> None:
        """Remove the entries whose callers have gone."""
        if any(entry.is_gone() for entry in self):
            for lane, entries in self._lanes.items():
                self._lanes[lane] = deque(entry for entry in entries if not entry.is_gone())
