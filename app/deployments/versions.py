"""Builds the versions of a set in this process, behind one graph."""

import asyncio
import logging
from functools import cache, partial

from app.caching.response_cache import RowStore
from app.calls.remote import StageHandle
from app.compute.inference_threads import on_own_thread
from app.deployments.set_stages import SetStages, StageBuilder
from app.environment import MIB
from app.errors import MAX_SHOWN, BadParameterError, UnknownModelError
from app.graph.cached import with_cache
from app.graph.rolling_update import Graph
from app.graph.service import EnsembleService
from app.settings import Settings
from app.tracing.parents import untraced_task
from app.traffic.comparison import cpu_ms
from app.traffic.control import TrafficControl
from app.traffic.graph import TrafficGraph
from app.traffic.plan import Plan
from app.traffic.versions import (
    check_fits,
    class_places,
    first_split,
    refused_by_gate,
    served_versions,
    version_name,
)
from models.errors import ModelSetError
from models.versions import split_version

logger = logging.getLogger("ray.serve")


class Versions:
    """Builds the versions that the settings name, and others on request."""

    def __init__(self, settings: Settings, stages: StageBuilder) -> None:
        """Build the settings' versions one after another, which takes seconds for each.

        Raises:
            TandemError: a version cannot be loaded, or does not fit the others.

        """
        self._settings, self._stages = settings, stages
        self._built: dict[str, SetStages] = {}
        self._cached = RowStore(settings.cache_mib * MIB)  # all versions' answers
        self._refused: dict[str, str | None] = {}
        self._loading = asyncio.Lock()
        self._loads: dict[tuple[str, bool], asyncio.Task[None]] = {}
        sets = served_versions(settings)
        graphs = {}
        for own, model_set in zip(settings.of_each_version(), sets, strict=True):
            # A shadow has its own threads: if it hangs, it blocks none that answer clients.
            built = stages.build(own, model_set, is_apart=bool(self._built))
            graphs[version_name(model_set, own.served_precision)] = self._join(own, built)
        self.graph = TrafficGraph(
            graphs,
            Plan.first(first_split(settings, sets)),
            settings.compare_ratio,
            lambda name: self._built[name].model_set.answer_rule,
            cache(lambda *pair: class_places(*(self._built[name].model_set for name in pair))),
        )

    @property
    def main(self) -> SetStages:
        """The stages of the version that answers most requests."""
        return self._built[self.graph.plan.split.main]

    def describe_to(self, service: EnsembleService) -> None:
        """Let a service describe itself as the main version, and know every version's labels.

        It leaves out the CPU time of copies.
        """
        service.version_labels = lambda: {
            name: built.model_set.labels for name, built in self._built.items()
        }
        self.graph.on_main = lambda: service.describes(self.main.model_set)
        threads = self._stages.threads_each
        self.graph.on_copy = lambda copy: service.usage.copied(cpu_ms(copy, threads))

    def control(self, traffic: StageHandle) -> TrafficControl:
        """Return the control of the traffic; ``traffic`` is the handle of its deployment."""
        return TrafficControl(traffic, self.graph, self._refused, self.load)

    async def load(self, name: str, is_to_answer: bool = False) -> None:
        """Build a version from the set's folder or store, on a thread of its own.

        Building continues if the caller goes away.

        Raises:
            UnknownModelError: no version has that name.
            BadParameterError: the version ``is_to_answer``, and the accuracy gate refuses it.
            TandemError: the version cannot be built, or does not fit the others.

        """
        key = name, is_to_answer
        if (task := self._loads.get(key)) is None:
            loading = self._load(name, is_to_answer=is_to_answer)
            task = self._loads[key] = untraced_task(loading)
            task.add_done_callback(lambda ended: self._load_ended(key, ended))
        await asyncio.shield(task)
        if is_to_answer and (reason := self._refused.get(name)) is not None:
            raise BadParameterError(f"{name} must not answer clients: {reason}")

    def _load_ended(self, key: tuple[str, bool], task: asyncio.Task[None]) -> None:
        del self._loads[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s was not loaded: %s", key[0][:MAX_SHOWN], error)

    async def _load(self, name: str, *, is_to_answer: bool) -> None:
        async with self._loading:
            if name in self._built:
                return
            base, version = split_version(name)
            folder, _ = split_version(self._settings.model_set)
            if version is None or base != self.main.model_set.name:
                raise UnknownModelError(
                    f"{name[:80]} is no version of {self.main.model_set.name}: name it as "
                    f"{next(iter(self._built))}"
                )
            own = self._settings.model_copy(update={"model_set": f"{folder}@{version}"})
            try:
                build = partial(self._build, own, name, is_to_answer=is_to_answer)
                built = await on_own_thread("load", build)
            except ModelSetError as error:
                raise UnknownModelError(error.message) from error
            self.graph.versions[name] = self._join(own, built)

    def _build(self, own: Settings, name: str, *, is_to_answer: bool) -> SetStages:
        """Load, check and compile a version; runs on a thread."""
        model_set = own.load_set()
        for built in list(self._built.values()):
            check_fits(built.model_set, model_set)
        if (
            is_now := version_name(model_set, own.served_precision)
        ) != name:  # of another precision
            raise UnknownModelError(f"{name} is served as {is_now}: use that name")
        if is_to_answer and (reason := refused_by_gate(model_set, own)) is not None:
            raise BadParameterError(f"{name} must not answer clients: {reason}")
        return self._stages.build(own, model_set, is_apart=True)

    def _join(self, own: Settings, built: SetStages) -> Graph:
        """Add a version's stages to those of this process, and return its graph."""
        self._stages.join(built)
        name = version_name(built.model_set, own.served_precision)
        self._built[name] = built
        self._refused[name] = refused_by_gate(built.model_set, own)
        return with_cache(built.ensemble, own, built.model_set, self._cached)

    async def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a stage of an answering version fails or hangs."""
        for name in self.graph.plan.split.answering:
            await self._built[name].check_health()
