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
    """A queue for each lane, in order of arrival; the lanes are attributes, to be looked at."""

    def __init__(self) -> None:
        self.interactive: deque[T] = deque()
        self.bulk: deque[T] = deque()
        self.shadow: deque[T] = deque()
        self._turns = LaneTurns()

    def lane(self, name: Lane) -> deque[T]:
        if name == "interactive":
            return self.interactive
        return self.bulk if name == "bulk" else self.shadow

    def __len__(self) -> int:
        """How many entries compete for the next turns; the shadow lane's only if no others wait."""
        return len(self.interactive) + len(self.bulk) or len(self.shadow)

    @property
    def num_answered(self) -> int:
        """How many entries wait outside of the shadow lane."""
        return len(self.interactive) + len(self.bulk)

    @property
    def answered(self) -> Iterator[T]:
        """Those of :attr:`num_answered`."""
        return chain(self.interactive, self.bulk)

    @property
    def is_shadow_only(self) -> bool:
        """Whether entries wait in the shadow lane and in no other."""
        return bool(self.shadow) and not self.interactive and not self.bulk

    def __iter__(self) -> Iterator[T]:
        return chain(self.interactive, self.bulk, self.shadow)

    def extend(self, entries: Iterable[T], lane: Lane) -> None:
        self.lane(lane).extend(entries)

    def pop(self) -> T:
        if not self.interactive and not self.bulk:
            return self.shadow.popleft()
        lane = self._turns.next(interactive=bool(self.interactive), bulk=bool(self.bulk))
        self._turns.taken(lane)
        return (self.bulk if lane == "bulk" else self.interactive).popleft()

    def forget_the_gone(self) -> bool:
        """Remove the entries whose callers have gone; return whether one was first in its lane."""
        lanes = (self.interactive, self.bulk, self.shadow)
        is_first_gone = False
        for entries in lanes:
            if entries and any(entry.is_gone() for entry in entries):
                is_first_gone = is_first_gone or entries[0].is_gone()
                left = [entry for entry in entries if not entry.is_gone()]
                entries.clear()
                entries.extend(left)
        return is_first_gone
