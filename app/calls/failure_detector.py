"""Failure detector: replicas that have not acknowledged a call within ``SUSPECT_AFTER_S``.

A replica says how many calls it has when it takes one, before it begins to work: that a healthy one
has much to do does not keep it from saying so.
"""

import time
from collections.abc import Callable, Hashable, Iterable

SUSPECT_AFTER_S = 1.0
PROBE_EVERY_S = 1.0


class FailureDetector:
    """What was asked of whom, and when; of replicas by their ids."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unheard_since: dict[Hashable, float] = {}
        self._next_ask: dict[Hashable, float] = {}

    def call_sent(self, replica: Hashable) -> None:
        """Note that a call was sent."""
        self._unheard_since.setdefault(replica, self._clock())

    def heard_from(self, replica: Hashable) -> None:
        """Note a sign of life."""
        self._unheard_since.pop(replica, None)
        self._next_ask.pop(replica, None)

    def retain(self, replicas: Iterable[Hashable]) -> None:
        """Forget all but these."""
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
