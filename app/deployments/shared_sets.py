"""Loads and unloads sets by name at all Gateways: the one asked reports to the hub ``Sets``."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from app.calls.hub_link import Book, HubLink
from app.deployments.served_sets import ServedSets
from app.errors import NotReadyError, UnknownModelError
from app.tracing.parents import untraced_task
from models.errors import TandemError

logger = logging.getLogger("ray.serve")
Change = tuple[int, bool]  # its revision, and whether the set is to be served
EVERYWHERE_S = 60.0  # how long a change waits for the other Gateways, which may have to load a set
AGAIN_AFTER_S = 10.0  # the pause before a change that failed at this Gateway is tried again


@dataclass(frozen=True)
class SetChanges:
    """The last change of each set that a caller loaded or unloaded; ``origin`` names the sets."""

    origin: str
    by_set: Mapping[str, Change] = field(default_factory=dict)

    @property
    def revision(self) -> int:
        return max((revision for revision, _ in self.by_set.values()), default=0)

    def merged(self, other: Self) -> Self:
        """Return the newer change of each set."""
        newer = {n: max(of, self.by_set.get(n, of)) for n, of in other.by_set.items()}
        return replace(self, by_set={**self.by_set, **newer})

    def changed(self, name: str, revision: int, is_wanted: bool) -> Self:
        return replace(self, by_set={**self.by_set, name: (revision, is_wanted)})


class SetBook(Book[SetChanges, None]):
    """Knows the last change of each set."""

    def change(self, name: str, is_wanted: bool) -> int:
        """Have a set served by all Gateways, or by none; return the change's revision."""
        self.facts = self.facts.changed(name, self.facts.revision + 1, is_wanted)
        return self.facts.revision


class SharedSets(HubLink):
    """A Gateway's sets, as the others have them; ``origin`` is that of the book."""

    def __init__(self, handle: Any, sets: ServedSets, origin: str) -> None:
        super().__init__(handle, "Sets")
        self._sets, self._facts = sets, SetChanges(origin)
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
            revision = await self.call("change", name, is_wanted)
            self._facts = self._facts.changed(name, revision, is_wanted)
            self._done[name] = revision
        revisions = await self._everywhere(revision, EVERYWHERE_S)
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
        return {n: of for n, of in self._facts.by_set.items() if of[0] > self._done.get(n, 0)}

    async def _exchange(self) -> None:
        facts = self._facts
        serves = min((revision - 1 for revision, _ in self._open.values()), default=facts.revision)
        if (newest := await self.call("report", self._gateway, facts, None, serves)) is not None:
            self._facts = self._facts.merged(newest)  # else of a service that is being replaced
        if self._open:
            self._load_soon(self._follow)

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
