"""Model sets that are loaded and unloaded while the service runs: in one Gateway, and in all.

A Gateway that is asked to load or unload a set reports it to the hub ``Sets``; the others follow.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from app.errors import MAX_SHOWN, ConfigError, NotReadyError, SetStateError, UnknownModelError
from app.graph.availability import Graph, OnDemandGraph
from app.graph.ensemble import with_cache
from app.graph.hub_link import Book, HubLink
from app.graph.served_models import check_accuracy, check_names
from app.graph.service import EnsembleService
from app.serve.set_stages import SetStages, StageBuilder
from app.settings import Settings
from app.stages.threads import on_own_thread
from app.telemetry.spans import untraced_task
from models.errors import TandemError
from models.model_set import ModelSet, list_folders

NAME = re.compile(r"\w[\w.-]*", re.ASCII)  # a set's name in a request: no path, version or URL
LOOK_EVERY_S = 0.05  # how often a set being unloaded is checked for requests under way
logger = logging.getLogger("ray.serve")
Change = tuple[int, bool]  # its revision, and whether the set is to be served
EVERYWHERE_S = 60.0  # how long a change waits for the other Gateways, which may have to load a set
AGAIN_AFTER_S = 10.0  # the pause before a change that failed at this Gateway is tried again


class ServedSets:
    """Serves sets with stages in this process; all but the default are loaded on demand.

    The default set stays loaded, since the interfaces refer to its service. Sets are loaded on a
    thread, one at a time, so that requests are answered meanwhile. ``default`` is the default
    set's service; None: that of the first set added.
    """

    def __init__(
        self, settings: Settings, stages: StageBuilder, default: EnsembleService | None = None
    ) -> None:
        self._settings, self._stages, self._default = settings, stages, default
        self._own: dict[str, Settings] = {}  # by set, kept while it is unloaded
        self._graphs: dict[str, OnDemandGraph] = {}  # by served set, without the default
        self._built: dict[Graph, SetStages] = {}  # by loaded graph
        self._building = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}

    @property
    def default(self) -> EnsembleService:
        assert self._default is not None
        return self._default

    def add(self, own: Settings, model_set: ModelSet, built: SetStages) -> None:
        """Serve a set with these stages; the first set is the default."""
        graph = self._join(own, model_set, built)
        if self._default is not None:
            graph = self._graphs[model_set.name] = OnDemandGraph(
                model_set.name,
                graph,
                partial(self._build, own, model_set),
                self._unload_graph,
                self._settings.unload_after_s,
            )
        self._own[model_set.name] = own
        cores, first = self._stages.cores, self._default
        service = EnsembleService(own, model_set, built.ensemble, cores, first, graph)
        service.threads_each = self._stages.threads_each
        self._default = first or service

    def unload_idle(self) -> None:
        """Begin to unload the networks of idle sets (``unload_after_s``)."""
        for graph in self._graphs.values():
            graph.unload_idle()

    def unloaded(self) -> dict[str, str]:
        """Return the state of each known set that is not served, by name."""
        known = dict.fromkeys(self._own, "UNAVAILABLE") | dict.fromkeys(self._loads, "LOADING")
        return {name: state for name, state in known.items() if name not in self.default.sets}

    async def load(self, name: str) -> None:
        """Serve a set of the settings or of the folders that are searched for sets, by its name.

        A served set is read again: if it has changed, the new version answers from then on.

        Raises:
            UnknownModelError: no set has that name.
            SetStateError: it is the default set and has changed; or stages are deployments.
            NoMemoryError: too little memory is free for its networks.
            TandemError: it cannot be served; the service stays as it was.
        """
        self._check_stages()
        if (task := self._loads.get(name)) is None:
            task = self._loads[name] = untraced_task(self._load(name))
            task.add_done_callback(lambda ended: self._load_ended(name, ended))
        await asyncio.shield(task)

    async def unload(self, name: str) -> None:
        """Stop serving a set, and free its memory once its requests have been answered.

        Raises:
            UnknownModelError: no set of that name was ever served.
            SetStateError: it is the default set; or stages are deployments.
        """
        self._check_stages()
        if name == self.default.name:
            raise SetStateError(
                f"{name} is the default set, for requests that name no set, and cannot be "
                "unloaded; start the service with another set first"
            )
        if (task := self._loads.get(name)) is not None:
            await asyncio.wait([task])
        if (service := self.default.sets.pop(name, None)) is not None:
            await asyncio.shield(untraced_task(self._retire(service, self._graphs.pop(name))))
        elif name not in self._own:
            raise UnknownModelError(f"no model set {name[:MAX_SHOWN]!r} is served")

    def _check_stages(self) -> None:
        if self._settings.has_versions:
            raise SetStateError(
                "this service serves versions of one set: change its traffic with PUT /v1/traffic, "
                "or serve several sets (model_sets) without traffic and shadow"
            )
        stages = ("decoder", "members", "combiner")
        apart = [s for s in stages if getattr(self._settings, s) == "deployment"]
        if apart:
            raise SetStateError(
                f"{apart[0]} is a deployment of its own, which serves one set: sets can be loaded "
                "and unloaded only if all stages are in the Gateway's process"
            )

    async def _load(self, name: str) -> None:
        own = self._own.get(name) or self._settings_of(name)
        model_set = await asyncio.to_thread(own.load_set)
        if model_set.name != name:
            raise UnknownModelError(f"the set in the folder {name} is called {model_set.name!r}")
        served = self.default.sets.get(name)
        precision = own.served_precision
        if served is not None and served.version == model_set.fingerprint(precision):
            if (graph := self._graphs.get(name)) is not None:
                await graph.load()
            return
        if served is self.default:
            raise SetStateError(
                f"{name} is the default set and has changed: deploy or start the service again"
            )
        self._check_names(model_set)  # before it is built, and after
        if (verdict := check_accuracy(model_set, own)).status != "verified":
            logger.warning(verdict.message)
        built = await self._build_stages(own, model_set)
        try:
            self._check_names(model_set)  # another set may have been loaded meanwhile
        except SetStateError:
            await self._stages.discard(built)
            raise
        before = self._graphs.get(name)
        self.add(own, model_set, built)
        if served is not None and before is not None:
            await self._retire(served, before)

    def _check_names(self, model_set: ModelSet) -> None:
        served = self.default.sets.items()
        others = [own.model_set for name, own in served if name != model_set.name]
        try:
            check_names([*others, model_set])
        except ConfigError as error:
            raise SetStateError(str(error)) from error

    def _load_ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._loads[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            is_callers = isinstance(error, UnknownModelError)  # no fault of this service
            level = logging.INFO if is_callers else logging.WARNING
            logger.log(level, "model set %s was not loaded: %s", name[:MAX_SHOWN], error)

    def _settings_of(self, name: str) -> Settings:
        """Return the settings of a set in the folders that are searched for sets."""
        folders = list_folders(self._settings.model_search)
        names = sorted({folder.name for folder in folders} | self._own.keys())
        if NAME.fullmatch(name) is None or name not in names:
            raise UnknownModelError(
                f"no model set {name[:MAX_SHOWN]!r} is in model_sets, model_dirs or bundled; "
                f"there are {', '.join(names)}"
            )
        return self._settings.of_one_more(name)

    def _join(self, own: Settings, model_set: ModelSet, built: SetStages) -> Graph:
        self._stages.join(built)
        graph = with_cache(built.ensemble, own, model_set)
        self._built[graph] = built
        return graph

    async def _build(self, own: Settings, model_set: ModelSet) -> Graph:
        return self._join(own, model_set, await self._build_stages(own, model_set))

    async def _build_stages(self, own: Settings, model_set: ModelSet) -> SetStages:
        async with self._building:

            def build() -> SetStages:
                self._stages.check_memory(own.served_precision, model_set)
                return self._stages.build(own, model_set)

            return await on_own_thread("load", build)

    async def _unload_graph(self, graph: Graph) -> None:
        await self._stages.remove(self._built.pop(graph))

    async def _retire(self, service: EnsembleService, graph: OnDemandGraph) -> None:
        """Unload a set that gets no more requests, once those under way have been answered."""
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                while service.admission.num_under_way:
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            logger.warning("%s is unloaded although requests of it still wait", service.name)
        await graph.close()
        if len(self.default.sets) == 1:
            self.default.admission.is_of_all = not self.default.settings.has_several_sets
        logger.info("model set %s, version %s: unloaded", service.name, service.version)


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
        """Unload a set at all Gateways; raises as :meth:`load` does."""
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
