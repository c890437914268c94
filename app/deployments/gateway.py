"""The Gateway: the ingress deployment. Serve's hooks only; the graph is :mod:`app.graph`'s."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from grpc_health.v1.health_pb2 import HealthCheckResponse
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.calls.remote import StageHandle
from app.deployments.assembly import assemble
from app.deployments.replica import start_replica
from app.graph.request import ClassifyRequest, RequestAnswers
from app.grpc.health import HealthInterface
from app.grpc.interface import GrpcInterface, Incoming
from app.grpc.open_inference import OpenInferenceInterface, OpenInferenceMethods
from app.grpc.servicer import Message
from app.grpc.tandem_pb2 import ClassifyReply
from app.http.api import create_api
from app.oip.inference import Inference
from app.oip.shared_memory import shared_memory_of
from app.settings import Settings


class Gateway(OpenInferenceMethods):
    """The graph's root. Stages without a handle run in its process."""

    def __init__(
        self,
        settings: Settings,
        decoder: StageHandle | None = None,
        members: Mapping[str, StageHandle] | None = None,
        combiner: StageHandle | None = None,
    ) -> None:
        start_replica(settings, is_ingress=True)
        self._graph = assemble(settings, decoder, members, combiner)
        self._service = self._graph.service
        self._grpc, self._health = GrpcInterface(self._service), HealthInterface(self._service)
        self._inference = Inference(self._service, shared_memory_of(settings))
        self._open_inference = OpenInferenceInterface(self._inference)
        self._has_started = members is None

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP interface; Serve calls this once per replica."""
        return create_api(self._service, self._inference)

    async def Classify(
        self, incoming: Incoming, grpc_context: RayServegRPCContext
    ) -> ClassifyReply:
        """Answer a gRPC call; Serve finds it, and the context's argument, by their names."""
        return await self._grpc.classify(incoming, grpc_context)

    async def Check(
        self, incoming: gRPCInputStream[Message], grpc_context: RayServegRPCContext
    ) -> HealthCheckResponse:
        """Answer a probe of gRPC's health protocol."""
        return await self._health.check(incoming, grpc_context)

    async def handle_forwarded(self, request: ClassifyRequest) -> RequestAnswers:
        """Answer a request of another Gateway; see :mod:`app.graph.rolling_update`."""
        return await self._service.handle_forwarded(request)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new queue settings for the members of this process (:class:`QueueConfig`)."""
        for member in self._graph.own_members:
            member.reconfigure(user_config)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to the autoscaling policy; Serve calls this when the Gateway scales."""
        return self._service.usage.figures()

    async def check_health(self) -> None:
        """Tell Serve whether this replica works; one that does not is replaced.

        Serve asks before it sends the first request: that waits until the members answer, so that
        in a rolling update no Gateway is there before its members are.

        Raises:
            UnhealthyError: a stage of this process fails or hangs.

        """
        if not self._has_started:
            await self._service.wait_ready()
            self._has_started = True
        await self._graph.check_health()
