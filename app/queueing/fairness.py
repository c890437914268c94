"""Shares cores and queues between model sets and between callers: start-time fair queueing.

See Goyal, Vin and Cheng, 1996. Each share has a virtual time, which its work advances by the
work's seconds divided by the share's weight. The share with the lowest virtual time is next. One
that was idle starts at the present virtual time, so that it gets no credit for being idle.

Model sets share the cores. Callers, who differ by the names of their keys, share each lane of a
queue: whoever floods it has only that share. The images of one caller go by their deadlines (EDF).

A caller who has used less than its share has credit, up to ``CREDIT_S``, so that a few photos at a
time do not wait for those of a caller who floods. While a *light* caller asks, batches of
others are smaller, since its photos wait for the batches that run.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from operator import attrgetter
from typing import Protocol, TypeVar

from app.access import ANYONE, Caller

# The most by which an image may overtake one of the same caller that came before it, in seconds:
# later deadlines count as this far away, so that none waits without end for short ones.
FAR_S = 5.0
CREDIT_S = 0.5  # of a core's time, for a caller with the weight 1
LIGHT_S = 3.0  # without a photo, after which a light caller counts no more
LOOK_EVERY_S = 0.01  # how often it is found out which callers are light
LATELY_S = 1.0  # without a request, after which a caller's places are the others'
MAX_SHARES = 1000  # of callers, from which on those that wait for nothing are forgotten


# Who sent the request that the present task answers.
CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYONE)


class CoreShare:
    """The weight and virtual time of a model set or a caller."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.ends = 0.0  # when its last work ends, in virtual seconds


class VirtualClock:
    """Computes when the work of each share would begin, in virtual seconds of one scheduler.

    A share that was idle begins up to ``credit_s`` before the present virtual time.
    """

    def __init__(self, credit_s: float = 0.0) -> None:
        self.now = 0.0  # when the last work began
        self._credit_s = credit_s
        self._latest_end = 0.0  # the latest end of any work

    def begins(self, share: CoreShare | None) -> float:
        """Return when the next work of a share would begin; 0 without a share."""
        return 0.0 if share is None else max(self.now - self._credit_s, share.ends)

    def taken(self, share: CoreShare | None, seconds: float) -> None:
        """Charge a share for work that takes about ``seconds``."""
        if share is not None:
            self.now = max(self.now, share.ends)
            self.charged(share, seconds)

    def charged(self, share: CoreShare, seconds: float) -> None:
        """Charge a share for time beyond its turns."""
        share.ends = self.begins(share) + seconds / share.weight
        self._latest_end = max(self._latest_end, share.ends)

    def idle(self) -> None:
        """End a busy period, so that no share's use in it counts later."""
        self.now = self._latest_end


class CallerShares:
    """The callers' shares of one scheduler, by name, and which of them ask at present."""

    def __init__(self) -> None:
        self.clock = VirtualClock(CREDIT_S)
        self.are_several = False  # otherwise nothing here takes part in the order
        self._shares: dict[str, CoreShare] = {}
        self._asked: dict[CoreShare, float] = {}  # when each asked last
        self._caller, self._share = ANYONE, self._share_of(ANYONE)  # who asked last
        self._looked, self._has_light = -math.inf, False

    def asks(self, caller: Caller, now: float) -> CoreShare:
        """Return the share of a caller, who asks at ``now``."""
        if caller is not self._caller:
            self._caller, self._share = caller, self._share_of(caller)
        self._asked[self._share] = now
        if len(self._asked) > 1:
            self._look(now)
        return self._share

    def has_light(self, now: float) -> bool:
        """Whether, of those who ask, one is light and another uses all of its share.

        Only callers with keys may be light: smaller batches cost a third of the throughput
        (tests/load/callers.py), and an address is a weak name.
        """
        if not (self.are_several and self._caller.has_key):
            return False
        self._look(now)
        return self._has_light

    def part_of(self, share: CoreShare) -> float:
        """Return a caller's part of a limit, 0 to 1; 0 while no other asks."""
        weights = sum(other.weight for other in self._asked)
        return share.weight / weights if self.are_several else 0.0

    def is_light(self, share: CoreShare) -> bool:
        """Whether a caller has used less than its share, by half of its credit or more."""
        return self.clock.begins(share) <= self.clock.now - CREDIT_S / 2

    def _share_of(self, caller: Caller) -> CoreShare:
        if (share := self._shares.get(caller.name)) is None:
            if len(self._shares) >= MAX_SHARES:
                self._shares = {
                    name: share
                    for name, share in self._shares.items()
                    if share.ends > self.clock.now or share in self._asked
                }
            share = self._shares[caller.name] = CoreShare()
            share.ends = self.clock.now  # without credit, or whoever begins to flood had it too
        share.weight = caller.share  # the file of keys may have changed
        return share

    def _look(self, now: float) -> None:
        """Find out who asked lately, unless that was found out just before."""
        if self.are_several and now - self._looked < LOOK_EVERY_S:
            return
        self._asked = {share: at for share, at in self._asked.items() if now - at < LIGHT_S}
        self._looked, self.are_several = now, len(self._asked) > 1
        is_heavy = any(share.ends >= self.clock.now for share in self._asked)
        self._has_light = is_heavy and any(map(self.is_light, self._asked))


class Entry(Protocol):
    """An entry of a lane."""

    @property
    def share(self) -> CoreShare:
        """Its caller's share."""

    @property
    def due(self) -> float:
        """When it is due, for the order among its caller's: the deadline, or ``FAR_S`` from now."""

    def is_gone(self) -> bool:
        """Whether nobody waits for the entry any more."""


T = TypeVar("T", bound=Entry)
DUE = attrgetter("due")


class FairLane(deque[T]):
    """Entries by deadline; they leave by their callers' virtual times first."""

    def __init__(self, shares: CallerShares) -> None:
        super().__init__()
        self._shares = shares

    def add(self, entries: Sequence[T]) -> None:
        """Add entries of one request, which are due at the same time."""
        if not (self and entries) or self[-1].due <= entries[0].due:  # the usual case
            self.extend(entries)
        else:
            for entry in entries:
                insort(self, entry, key=DUE)

    @property
    def next(self) -> T:
        """The entry that leaves next."""
        if not self._shares.are_several:
            return self[0]
        firsts: dict[CoreShare, T] = {}
        for entry in self:
            firsts.setdefault(entry.share, entry)
        return min(firsts.values(), key=self._order_of)

    def _order_of(self, entry: T) -> tuple[float, float]:
        return self._shares.clock.begins(entry.share), entry.due

    @property
    def order(self) -> tuple[float, float]:
        """The key by which lanes take turns: the next caller's virtual time, then the deadline."""
        return self._order_of(self.next)

    @property
    def num_light(self) -> int:
        """How many entries wait of light callers."""
        if not self._shares.are_several:
            return 0
        is_light = self._shares.is_light
        return sum(is_light(entry.share) for entry in self)

    def take(self, cost_s: float = 0.0) -> T:
        """Take the next entry, and charge its caller for this work."""
        entry = self.next
        self.remove(entry)
        self._shares.clock.taken(entry.share, cost_s)
        return entry


class Held:
    """What a caller holds of a limit, and when it asked last."""

    __slots__ = ("asked_at", "num", "weight")

    def __init__(self) -> None:
        self.num, self.asked_at, self.weight = 0, -math.inf, 1.0


class CallerPlaces:
    """Counts the places that each caller holds of a limit, for a share of them."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}  # by the caller's name

    def of(self, caller: Caller, now: float) -> Held:
        """Return what a caller holds, who asks for a place at ``now``."""
        if (held := self._held.get(caller.name)) is None:
            if len(self._held) >= MAX_SHARES:
                self._forget(now)
            held = self._held[caller.name] = Held()
        held.asked_at, held.weight = now, caller.share
        return held

    def give_back(self, caller: Caller) -> None:
        self._held[caller.name].num -= 1

    def shares_of(self, held: Held, limit: int) -> tuple[int, int]:
        """Return how many places of ``limit`` are a caller's own, and one's who begins to ask.

        The others are those who asked lately, or hold places.
        """
        if len(self._held) > 1:
            self._forget(held.asked_at)
        weights = sum(other.weight for other in self._held.values())
        return int(limit * held.weight / weights), int(limit / (weights + 1))

    def _forget(self, now: float) -> None:
        """Forget the callers who neither asked lately nor hold a place."""
        since, held = now - LATELY_S, self._held.items()
        self._held = {name: own for name, own in held if own.num or own.asked_at > since}
