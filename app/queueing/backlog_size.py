"""A larger batch size for a backlog, compiled when a backlog first occurs.

Larger batches cost less per image: the weights are read once for all of them. But while few images
wait, a large batch leaves other cores idle, and each of its images waits for all. It also takes
memory, which a service without backlogs does not need (decision 0033).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger("ray.serve")


class BacklogSize:
    """Twice the usual largest batch size, while enough images wait.

    Args:
        name: the member's name, for the log.
        usual: the largest batch size without a backlog.
        num_places: batches that run at a time; a backlog fills all of them at the larger size.
        prepare: compiles the network for ``2 * usual`` images; may raise anything.

    """

    def __init__(
        self, name: str, usual: int, num_places: int, prepare: Callable[[], Awaitable[None]]
    ) -> None:
        self.usual, self.size = usual, 2 * usual
        self._name, self._prepare = name, prepare
        # With one place, two batches are a backlog too: the second waits for the first.
        self._num_enough = self.size * max(2, num_places)
        self._is_ready = False
        self._preparing: asyncio.Task[None] | None = None

    def is_due(self, num_waiting: int) -> bool:
        """Whether the next batch should have the larger size, as ``num_waiting`` images wait."""
        return self._is_ready and num_waiting >= self._num_enough

    def waited(self, num: int) -> None:
        """Record how many images waited when a batch was formed; prepare if that is a backlog."""
        if self._preparing is None and num >= self._num_enough:
            self._preparing = asyncio.get_running_loop().create_task(self._be_prepared())

    async def _be_prepared(self) -> None:
        try:
            await self._prepare()
        except Exception as error:
            logger.warning(
                "%s: cannot prepare batches of %d: %s; it continues with batches of %d. Fix the "
                "cause and restart, or set backlog_batches: false",
                self._name,
                self.size,
                error,
                self.usual,
            )
        else:
            self._is_ready = True
            logger.info("%s: uses batches of %d while a backlog waits", self._name, self.size)
