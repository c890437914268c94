"""The Gateway: the ingress deployment, with Serve's hooks around the graph of :mod:`app.graph`."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from grpc_health.v1.health_pb2 import HealthCheckResponse
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.calls.remote import StageHandle
from app.deployments.assembly import assemble
from app.deployments.replica import start_replica
from app.deployments.shared_sets import SharedSets
from app.graph.request import ClassifyRequest, RequestAnswers
from app.grpc.health import HealthInterface
from app.grpc.interface import GrpcInterface, Incoming
from app.grpc.open_inference import OpenInferenceInterface, OpenInferenceMethods
from app.grpc.receiver import Receiver
from app.grpc.servicer import Message
from app.grpc.tandem_pb2 import ClassifyReply
from app.http.api import create_api
from app.oip.inference import Inference
from app.oip.shared_memory import regions_of
from app.samples.feedback import Feedback
from app.samples.sampler import disagreement_sampler_of, sampler_of
from app.settings import Settings
from app.traffic.control import TrafficControl


class Gateway(OpenInferenceMethods):
    """The root of the graph; stages without a handle run in its process."""

    def __init__(
        self,
        settings: Settings,
        decoder: StageHandle | None = None,
        members: Mapping[str, StageHandle] | None = None,
        combiner: StageHandle | None = None,
        feedback: StageHandle | None = None,
        traffic: StageHandle | None = None,
        sets: StageHandle | None = None,
    ) -> None:
        start_replica(settings, is_ingress=True)
        self._graph = assemble(settings, decoder, members, combiner)
        self._service = self._graph.service
        self._feedback = Feedback(feedback) if feedback is not None else None
        listeners = sampler_of(settings), self._feedback
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
        self._has_started = members is None
        self._traffic: TrafficControl | None = None
        if self._graph.versions is not None and traffic is not None:
            self._traffic = self._graph.versions.control(traffic)
            if (sampler := disagreement_sampler_of(settings)) is not None:
                self._graph.versions.graph.on_disagreement = sampler.note_disagreement

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP interface; Serve calls this once in each replica."""
        return create_api(self._service, self._inference, self._feedback, self._traffic)

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
        """Answer a request that another Gateway forwarded; see :mod:`app.graph.rolling_update`."""
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
        if self._sets is not None:
            await self._sets.start()
        await self._graph.check_health()
