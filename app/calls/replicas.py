"""The replicas of each deployment, as routers and channels know them, and which are silent.

Serve updates a router on the router's own thread; calls are made on another. Values that both use
are replaced as a whole, so no lock is needed.

A replica is suspected if it has not acknowledged a call within ``SUSPECT_AFTER_S``. It acknowledges
a call before it starts to work, with its number of calls. So a healthy replica is not suspected for
being busy.
"""

import time
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

SUSPECT_AFTER_S = 1.0
PROBE_EVERY_S = 1.0


class KnownReplicas(NamedTuple):
    """The replicas of a deployment."""

    num: int
    near: tuple[str, ...] = ()  # the unique ids of the replicas on this process's node


_known: dict[tuple[str, str], KnownReplicas] = {}
_BEFORE_ANY = KnownReplicas(1)
_silent: set[str] = set()  # replicas


def note_replicas(app_name: str, deployment_name: str, known: KnownReplicas) -> None:
    """Store the replicas that a router received."""
    _known[app_name, deployment_name] = known


def known_replicas(app_name: str, deployment_name: str) -> KnownReplicas:
    """Return the last stored replicas; before that, one replica on an unknown node."""
    return _known.get((app_name, deployment_name), _BEFORE_ANY)


def note_silent(replica_id: str, *, is_silent: bool) -> None:
    """Note whether a replica with calls on its channel has stopped responding."""
    (_silent.add if is_silent else _silent.discard)(replica_id)


def is_silent(replica_id: str) -> bool:
    """Whether a replica does not respond on its channel."""
    return replica_id in _silent


class FailureDetector:
    """A failure detector: tracks by replica id when calls were sent and when it was last heard."""

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
        """Whether a call has been unacknowledged for too long."""
        since = self._unheard_since.get(replica)
        return since is not None and self._clock() - since > SUSPECT_AFTER_S

    def should_probe(self, replica: Hashable) -> bool:
        """Whether a silent replica should be probed now; limits the rate of probes."""
        now = self._clock()
        if now < self._next_ask.get(replica, now):
            return False
        self._next_ask[replica] = now + PROBE_EVERY_S
        return True
