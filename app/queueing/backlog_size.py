"""A batch size for a backlog, which the network learns when there first is one.

A larger batch costs less an image: the weights are read once for all of them, and there are fewer
batches to run. But where few images wait it would leave other cores with nothing to do, and who is
in it waits for all of it. It takes memory as well, which a service that is never behind does not
need (app/DECISIONS.md, "Batches of a backlog").
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger("ray.serve")


class BacklogSize:
    """Twice the usual largest size, for as long as enough images wait.

    Args:
        name: whose it is, for the log.
        usual: the largest size otherwise.
        num_places: batches that run at a time; all of them must find as many images.
        prepare: makes the network take ``2 * usual`` images; may raise anything.

    """

    def __init__(
        self, name: str, usual: int, num_places: int, prepare: Callable[[], Awaitable[None]]
    ) -> None:
        self.usual, self.size = usual, 2 * usual
        self._name, self._prepare = name, prepare
        # Of one place a backlog is two batches, as well: the next one waits behind it.
        self._num_enough = self.size * max(2, num_places)
        self._is_ready = False
        self._preparing: asyncio.Task[None] | None = None

    def is_due(self, num_waiting: int) -> bool:
        """Whether the next batch of so many waiting images should have the size."""
        return self._is_ready and num_waiting >= self._num_enough

    def waited(self, num: int) -> None:
        """Note that so many images waited when a batch was formed; a backlog is prepared for."""
        if self._preparing is None and num >= self._num_enough:
            self._preparing = asyncio.get_running_loop().create_task(self._be_prepared())

    async def _be_prepared(self) -> None:
        try:
            await self._prepare()
        except Exception as error:
            logger.warning(
                "%s: no batches of %d: %s; it serves on in batches of %d. Mend that and restart, "
                "or set backlog_batches: false",
                self._name,
                self.size,
                error,
                self.usual,
            )
        else:
            self._is_ready = True
            logger.info("%s: batches of %d while a backlog waits", self._name, self.size)
