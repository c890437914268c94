"""The Gateway: the ingress deployment, and the graph of stages here and behind handles.

Several versions of one set are built in this process, behind one graph.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fastapi import FastAPI
from grpc_health.v1.health_pb2 import HealthCheckResponse
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.answers import cpu_ms
from app.environment import MIB
from app.errors import MAX_SHOWN, BadParameterError, UnknownModelError
from app.graph.availability import Graph
from app.graph.ensemble import with_cache
from app.graph.request import ClassifyRequest, RequestAnswers, RowStore
from app.graph.served_models import refused_by_gate
from app.graph.service import EnsembleService
from app.grpc.call import Message
from app.grpc.interface import GrpcInterface, HealthInterface, Incoming, Receiver
from app.grpc.open_inference import OpenInferenceInterface, OpenInferenceMethods
from app.grpc.tandem_pb2 import ClassifyReply
from app.grpc.tensorflow_serving import TensorFlowInterface, TensorFlowMethods
from app.http.api import create_api
from app.oip.inference import Inference
from app.oip.regions import regions_of
from app.samples.feedback import Feedback, taught_of
from app.samples.samples import (
    Erased,
    SampleEraser,
    SharedSamples,
    disagreement_sampler_of,
    sampler_of,
)
from app.serve.replica import start_replica
from app.serve.set_stages import SetStages, StageBuilder, StageHandle
from app.serve.sets import ServedSets, SharedSets
from app.settings import Settings
from app.stages.threads import on_own_thread
from app.telemetry.spans import untraced_task
from app.traffic.control import (
    TrafficControl,
    check_fits,
    class_places,
    first_split,
    served_versions,
    version_name,
)
from app.traffic.graph import ShadowLane, TrafficGraph
from app.traffic.plan import Plan
from models.errors import ModelSetError
from models.model_set import ModelSet
from models.stores import split_version

FREED_WITHIN_S = 10.0  # how long a load waits for the memory of versions that are unloaded
logger = logging.getLogger("ray.serve")


class Gateway(OpenInferenceMethods, TensorFlowMethods):
    """The root of the graph; stages without a handle run in its process."""

    def __init__(
        self,
        settings: Settings,
        decoder: StageHandle | None = None,
        members: Mapping[str, StageHandle] | None = None,
        combiner: StageHandle | None = None,
        feedback: StageHandle | None = None,
        samples: StageHandle | None = None,
        traffic: StageHandle | None = None,
        sets: StageHandle | None = None,
    ) -> None:
        start_replica(settings, is_ingress=True)
        self._graph = assemble(settings, decoder, members, combiner)
        self._service = self._graph.service
        self._feedback = Feedback(feedback) if feedback is not None else None
        self._taught = taught_of(settings)
        erased = Erased()
        self._samples: SharedSamples | None = None
        if samples is not None:
            eraser = SampleEraser(settings, settings.max_files, erased)
            self._samples = SharedSamples(samples, eraser)
        sampler = sampler_of(settings, erased, has_versions=settings.has_versions)
        listeners = sampler, self._feedback
        self._service.listeners += [each for each in listeners if each is not None]
        receiver = Receiver(self._service.settings)  # large messages share its room
        self._grpc = GrpcInterface(self._service, receiver)
        self._health = HealthInterface(self._service)
        self._sets: SharedSets | None = None
        if sets is not None:
            self._sets = SharedSets(sets, self._graph.sets, ",".join(settings.model_sets or ()))
        loader = self._sets or self._graph.sets
        self._inference = Inference(
            self._service, regions_of(is_on=bool(settings.shared_memory)), loader
        )
        self._open_inference = OpenInferenceInterface(self._inference, receiver)
        self._tensorflow = TensorFlowInterface(self._inference, receiver)
        self._has_started = members is None
        self._traffic: TrafficControl | None = None
        if self._graph.versions is not None and traffic is not None:
            self._traffic = self._graph.versions.control(traffic)
            if (sampler := disagreement_sampler_of(settings, erased)) is not None:
                self._graph.versions.graph.on_disagreement = sampler.note_disagreement

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP interface; Serve calls this once in each replica."""
        return create_api(
            self._service,
            self._inference,
            self._feedback,
            self._traffic,
            self._taught,
            self._samples,
        )

    async def Classify(
        self, incoming: Incoming, grpc_context: RayServegRPCContext
    ) -> ClassifyReply:
        """Answer a gRPC call; Serve finds the method and its ``grpc_context`` by name."""
        return await self._grpc.classify(incoming, grpc_context)

    async def Check(
        self, incoming: gRPCInputStream[Message], grpc_context: RayServegRPCContext
    ) -> HealthCheckResponse:
        """Answer a health check of gRPC's health protocol."""
        return await self._health.check(incoming, grpc_context)

    async def handle_forwarded(self, request: ClassifyRequest) -> RequestAnswers:
        """Answer a request that another Gateway forwarded; see :mod:`app.graph.availability`."""
        return await self._service.handle_forwarded(request)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change queue settings of the members in this process (:class:`QueueConfig`)."""
        self._graph.stages.reconfigure(user_config)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return statistics for the autoscaling policy; Serve calls this if the Gateway scales."""
        return self._service.usage.figures()

    async def check_health(self) -> None:
        """Raise if this replica does not work, so that Serve replaces it.

        Serve calls this before it sends the first request. That call waits until the members
        answer, so that in a rolling update no Gateway serves before its members do.

        Raises:
            UnhealthyError: a stage in this process fails or hangs.
        """
        if not self._has_started:
            await self._service.wait_ready()
            self._has_started = True
        if self._traffic is not None:
            await self._traffic.start()
        for shared in (self._sets, self._samples):
            if shared is not None:
                await shared.start()
        await self._graph.check_health()


class Versions:
    """Builds the versions that the settings name, and others on request."""

    def __init__(self, settings: Settings, stages: StageBuilder) -> None:
        """Build the settings' versions one after another, which takes seconds for each.

        Raises:
            TandemError: a version cannot be loaded, or does not fit the others.
        """
        self._settings, self._stages = settings, stages
        self._built: dict[str, SetStages] = {}
        self._sets: dict[str, ModelSet] = {}  # of unloaded versions too: copies are compared later
        self._cached = RowStore(settings.cache_mib * MIB)  # all versions' answers
        self._refused: dict[str, str | None] = {}
        self._loading = asyncio.Lock()
        self._loads: dict[tuple[str, bool], asyncio.Task[None]] = {}
        self._unloads: set[asyncio.Task[None]] = set()
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
            lambda name: self._sets[name].answer_rule,
            cache(lambda *pair: class_places(*(self._sets[name] for name in pair))),
            ShadowLane(stages.scheduler, settings.copy_share),
        )

    @property
    def main(self) -> SetStages:
        """The stages of the version that answers most requests."""
        return self._built[self.graph.plan.split.main]

    def describe_to(self, service: EnsembleService) -> None:
        """Let a service describe itself as the main version, and know every version's set.

        It leaves out the CPU time of copies.
        """
        service.version_sets = lambda: {
            name: built.model_set for name, built in self._built.items()
        }
        self.graph.on_main = lambda: service.describes(self.main.model_set)
        threads = service.threads_each = self._stages.threads_each
        self.graph.on_copy = lambda copy: service.usage.copied(cpu_ms(copy, threads))

    def control(self, traffic: StageHandle) -> TrafficControl:
        """Return the control of the traffic; ``traffic`` is the handle of its deployment."""
        return TrafficControl(traffic, self.graph, self._refused, self.load, self.unload)

    async def load(self, name: str, is_to_answer: bool = False) -> None:
        """Build a version from the set's folder or store, on a thread of its own.

        Building continues if the caller goes away.

        Raises:
            UnknownModelError: no version has that name.
            BadParameterError: the version ``is_to_answer``, and the accuracy gate refuses it.
            NoMemoryError: too little memory is free for its networks.
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

    def unload(self, name: str) -> None:
        """Free a version that is in no plan, in the background: once no request uses it."""
        graph, built = self.graph.versions.pop(name), self._built.pop(name)
        del self._refused[name]
        task = untraced_task(self._free(name, graph, built))
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    async def _free(self, name: str, graph: Graph, built: SetStages) -> None:
        await self.graph.unused(graph)
        await self._stages.remove(built)
        logger.info("%s: unloaded, none of the last plans names it", name)

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
                if self._unloads:  # their memory is free only then
                    await asyncio.wait(self._unloads, timeout=FREED_WITHIN_S)
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
        is_now = version_name(model_set, own.served_precision)
        if is_now != name:  # of another precision
            raise UnknownModelError(f"{name} is served as {is_now}: use that name")
        if is_to_answer and (reason := refused_by_gate(model_set, own)) is not None:
            raise BadParameterError(f"{name} must not answer clients: {reason}")
        self._stages.check_memory(own.served_precision, model_set)
        return self._stages.build(own, model_set, is_apart=True)

    def _join(self, own: Settings, built: SetStages) -> Graph:
        """Add a version's stages to those of this process, and return its graph."""
        self._stages.join(built)
        name = version_name(built.model_set, own.served_precision)
        self._built[name], self._sets[name] = built, built.model_set
        self._refused[name] = refused_by_gate(built.model_set, own)
        return with_cache(built.ensemble, own, built.model_set, self._cached)

    async def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a stage of an answering version fails or hangs."""
        for name in self.graph.plan.split.answering:
            await self._built[name].check_health()


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

    With several sets, or versions of one, there are no handles: their members share one scheduler,
    and their Decoders the same threads. All versions are behind one service.
    """
    stages = StageBuilder(settings, decoder, members, combiner)
    if settings.has_versions:
        versions = Versions(settings, stages)
        main, graph = versions.main, versions.graph
        default = EnsembleService(
            settings, main.model_set, main.ensemble, stages.cores, None, graph
        )
        versions.describe_to(default)
        return Assembly(ServedSets(settings, stages, default), stages, versions)
    of_sets = [(own, own.load_set()) for own in settings.of_each_set()]
    sets = ServedSets(settings, stages)
    for own, model_set in of_sets:
        sets.add(own, model_set, stages.build(own, model_set))
    return Assembly(sets, stages)
