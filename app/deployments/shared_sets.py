"""Loads and unloads sets by name at all Gateways: who is asked tells the deployment ``Sets``."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from app.calls.hub_link import EXCHANGE_EVERY_S, HubLink
from app.deployments.served_sets import ServedSets
from app.deployments.sets import Change
from app.errors import NotReadyError, UnknownModelError
from app.tracing.parents import untraced_task
from models.errors import TandemError

logger = logging.getLogger("ray.serve")
EVERYWHERE_S = 60.0  # how long a change waits for the other Gateways, which may have to load a set
AGAIN_AFTER_S = 10.0  # the pause before a change that failed at this Gateway is tried again


class SharedSets(HubLink):
    """A Gateway's sets, as the others have them; ``origin`` is that of the deployment."""

    def __init__(self, handle: Any, sets: ServedSets, origin: str) -> None:
        super().__init__(handle, "Sets")
        self._sets, self._origin = sets, origin
        self._changes: dict[str, Change] = {}
        self._done: dict[str, int] = {}  # the revision of each set that is served here
        self._turn = asyncio.Lock()

    def unloaded(self) -> Mapping[str, str]:
        return self._sets.unloaded()

    async def load(self, name: str) -> None:
        """Serve a set in all Gateways; raise :class:`NotReadyError` if that takes too long.

        An error of :meth:`ServedSets.load` is raised before any other Gateway changes.
        """
        await asyncio.shield(untraced_task(self._change(name, is_wanted=True)))

    async def unload(self, name: str) -> None:
        """Serve a set no more; as :meth:`load`."""
        await asyncio.shield(untraced_task(self._change(name, is_wanted=False)))

    async def _change(self, name: str, *, is_wanted: bool) -> None:
        async with self._turn:
            await self._make(name, is_wanted=is_wanted)
            await self._exchange()  # the deployment may have begun anew
            revision = await self._call("change", name, is_wanted)
            self._changes[name] = revision, is_wanted
            self._done[name] = revision
        revisions = [0]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVERYWHERE_S):
                while min(revisions, default=revision) < revision:
                    await self._exchange()
                    revisions = await self._call("revisions")
                    await asyncio.sleep(EXCHANGE_EVERY_S / 4)
        if behind := sum(other < revision for other in revisions):
            raise NotReadyError(
                f"{behind} of {len(revisions)} Gateways do not follow for {name} yet; they go on "
                "trying, and their log says why: ask again"
            )

    async def _make(self, name: str, *, is_wanted: bool) -> None:
        await (self._sets.load(name) if is_wanted else self._sets.unload(name))

    @property
    def _open(self) -> dict[str, Change]:
        """The changes that are not made here."""
        return {n: of for n, of in self._changes.items() if of[0] > self._done.get(n, 0)}

    async def _exchange(self) -> None:
        newest = max((revision for revision, _ in self._changes.values()), default=0)
        serves = min((revision - 1 for revision, _ in self._open.values()), default=newest)
        facts = self._origin, self._changes, serves
        if (changes := await self._call("report", self._gateway, *facts)) is not None:
            self._changes = dict(changes)  # else of a service that is being replaced
        if self._open and (self._loading is None or self._loading.done()):
            self._loading = untraced_task(self._follow())

    async def _follow(self) -> None:
        async with self._turn:
            for name, (revision, is_wanted) in self._open.items():
                try:
                    with contextlib.suppress(*() if is_wanted else (UnknownModelError,)):
                        await self._make(name, is_wanted=is_wanted)
                    self._done[name] = revision
                except TandemError as error:
                    logger.warning("this Gateway does not follow for %s: %s", name, error)
                except Exception:  # of a runtime, or no memory; this Gateway serves its other sets
                    logger.exception("this Gateway does not follow for %s", name)
        if self._open:
            await asyncio.sleep(AGAIN_AFTER_S)
