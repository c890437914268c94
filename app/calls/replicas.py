"""Which replicas each deployment has, as its routers and channels know them, and which are silent.

Serve tells a router, which runs on a thread of its own; calls are made on another one. Every value
that both use is replaced as a whole, so that none needs a lock.

A replica is suspected that has not acknowledged a call within ``SUSPECT_AFTER_S``. It says how many
calls it has when it takes one, before it begins to work: that a healthy one has much to do does not
keep it from saying so.
"""

import time
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

SUSPECT_AFTER_S = 1.0
PROBE_EVERY_S = 1.0


class KnownReplicas(NamedTuple):
    """The replicas of a deployment."""

    num: int
    near: tuple[str, ...] = ()  # the unique ids of those on this process's node


_known: dict[tuple[str, str], KnownReplicas] = {}
_BEFORE_ANY = KnownReplicas(1)
_silent: set[str] = set()  # replicas


def note_replicas(app_name: str, deployment_name: str, known: KnownReplicas) -> None:
    """Note what a router was told."""
    _known[app_name, deployment_name] = known


def known_replicas(app_name: str, deployment_name: str) -> KnownReplicas:
    """Return what was noted last; one replica somewhere before anything was."""
    return _known.get((app_name, deployment_name), _BEFORE_ANY)


def note_silent(replica_id: str, *, is_silent: bool) -> None:
    """Note whether a replica that has calls on its channel gives no sign of life."""
    (_silent.add if is_silent else _silent.discard)(replica_id)


def is_silent(replica_id: str) -> bool:
    """Whether a replica does not answer on its channel."""
    return replica_id in _silent


class FailureDetector:
    """Failure detector: what was asked of whom, and when; of replicas by their ids."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unheard_since: dict[Hashable, float] = {}
        self._next_ask: dict[Hashable, float] = {}

    def call_sent(self, replica: Hashable) -> None:
        self._unheard_since.setdefault(replica, self._clock())

    def heard_from(self, replica: Hashable) -> None:
        self._unheard_since.pop(replica, None)
        self._next_ask.pop(replica, None)

    def retain(self, replicas: Iterable[Hashable]) -> None:
        for gone in (self._unheard_since.keys() | self._next_ask.keys()) - set(replicas):
            self.heard_from(gone)

    def is_suspected(self, replica: Hashable) -> bool:
        """Whether nothing came back for too long."""
        since = self._unheard_since.get(replica)
        return since is not None and self._clock() - since > SUSPECT_AFTER_S

    def should_probe(self, replica: Hashable) -> bool:
        """Whether it is time to ask a silent one how it is; true once every so often."""
        now = self._clock()
        if now < self._next_ask.get(replica, now):
            return False
        self._next_ask[replica] = now + PROBE_EVERY_S
        return True
