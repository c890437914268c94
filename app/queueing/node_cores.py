"""The cores of a node as its Gateway knows them: by what it has asked of the stages there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.queueing.scheduler import Source, num_worth_waiting_for


class NodeCores:
    """Counts the calls under way of the members that share a node's cores with the Gateway.

    What others have asked of them it does not see: then more is busy than it knows of.

    Args:
        num_cores: of the node.
        source: what makes the images for the members, on the same cores.

    """

    def __init__(self, num_cores: int, source: Source) -> None:
        self._num_cores, self._source = num_cores, source
        self._num_calls = 0  # each keeps a core busy
        self._told: list[Callable[[], None]] = []
        source.tell(self._changed)

    def num_worth_waiting_for(self) -> int:
        """Return how many images are coming; 0 if a core is idle until they have come."""
        return num_worth_waiting_for(self._source, self._num_calls, self._num_cores)

    def tell(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` on the loop when fewer images are coming, or a core is free."""
        self._told.append(changed)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call of a member on this node as long as it is under way."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._changed()

    def _changed(self) -> None:
        for changed in self._told:
            changed()
