"""Assembles the graph from stages in this process and deployments behind handles."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.calls.remote import StageHandle
from app.deployments.served_sets import ServedSets
from app.deployments.set_stages import StageBuilder
from app.deployments.versions import Versions
from app.graph.service import EnsembleService
from app.settings import Settings


@dataclass(frozen=True)
class Assembly:
    """The assembled graph, and its stages in this process."""

    sets: ServedSets
    stages: StageBuilder
    versions: Versions | None = None  # the set's versions, if the settings name several

    @property
    def service(self) -> EnsembleService:
        """The service of the default set, through which the others are found."""
        return self.sets.default

    async def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a stage in this process fails or hangs.

        Serve calls this every few seconds, so idle sets are unloaded here too.
        """
        self.sets.unload_idle()
        if self.versions is not None:  # without the shadow, which answers no client
            await self.versions.check_health()
            return
        for of_set in self.stages.joined:
            await of_set.check_health()


def assemble(
    settings: Settings,
    decoder: StageHandle | None = None,
    members: Mapping[str, StageHandle] | None = None,
    combiner: StageHandle | None = None,
) -> Assembly:
    """Build each set's graph; stages without a handle are built in this process, on its cores.

    With several sets there are no handles: their members share one scheduler, and their Decoders
    the same threads.
    """
    if settings.has_versions:
        return _with_versions(settings, StageBuilder(settings))
    of_sets = [(own, own.load_set()) for own in settings.of_each_set()]
    stages = StageBuilder(settings, decoder, members, combiner)
    sets = ServedSets(settings, stages)
    for own, model_set in of_sets:
        sets.add(own, model_set, stages.build(own, model_set))
    return Assembly(sets, stages)


def _with_versions(settings: Settings, stages: StageBuilder) -> Assembly:
    """Build every version of the set behind one service."""
    versions = Versions(settings, stages)
    main, graph = versions.main, versions.graph
    service = EnsembleService(settings, main.model_set, main.ensemble, stages.cores, None, graph)
    versions.describe_to(service)
    return Assembly(ServedSets(settings, stages, service), stages, versions)
