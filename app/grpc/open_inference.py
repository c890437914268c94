"""The Open Inference Protocol over gRPC: the methods of ``inference.GRPCInferenceService``."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from ray.serve.grpc_util import RayServegRPCContext

from app.caching.response_cache import CACHE_CONTROL
from app.graph.observer import RequestObserver
from app.graph.request import RequestOptions
from app.grpc import open_inference_pb2 as messages
from app.grpc.call import GrpcCall, answered
from app.grpc.infer_messages import infer_request_of, infer_response_of
from app.grpc.receiver import Receiver, ShortReceiver
from app.grpc.request import announced_bytes, parsed, timeout_s_of
from app.grpc.servicer import OPEN_INFERENCE
from app.grpc.shared_memory import RegionCalls, SharedMemoryMethods, Stream, is_local
from app.messages import Fault
from app.oip.inference import Inference, ModelRequest
from app.oip.models import server_metadata
from app.queueing.byte_budget import Share
from app.queueing.haproxy_headers import REFUSED_HEADER
from models.errors import TandemError

OPEN_METHODS = frozenset({"ServerLive", "ServerReady"})  # a load balancer's probes have no key
INFER = "ModelInfer"
# Nothing in their messages counts, so they are answered without one.
WITHOUT_MESSAGE = OPEN_METHODS | {"ServerMetadata", "RepositoryIndex"}


class OpenInferenceInterface:
    """Answers calls with ``inference``; errors are the context's status, the reply empty."""

    def __init__(self, inference: Inference) -> None:
        self._inference, self._service = inference, inference.service
        self._has_cache = inference.service.settings.cache != "none"
        self._receiver = Receiver(self._service.settings)
        self._short = ShortReceiver(self._receiver)
        self._regions = RegionCalls(inference.shared_memory)
        self._methods: dict[str, tuple[type[Any], Callable[[Any], Awaitable[Any]]]] = {
            "ServerLive": (messages.ServerLiveRequest, self._server_live),
            "ServerReady": (messages.ServerReadyRequest, self._server_ready),
            "ServerMetadata": (messages.ServerMetadataRequest, self._server_metadata),
            "ModelReady": (messages.ModelReadyRequest, self._model_ready),
            "ModelMetadata": (messages.ModelMetadataRequest, self._model_metadata),
            "ModelStatistics": (messages.ModelStatisticsRequest, self._model_statistics),
            "RepositoryIndex": (messages.RepositoryIndexRequest, self._repository_index),
        }

    async def call(self, method: str, incoming: Stream, context: RayServegRPCContext) -> Any:
        """Answer one call of a method."""
        call = GrpcCall(OPEN_INFERENCE, method, context)
        reply = getattr(messages, f"{method}Response")
        answering = self._infer if method == INFER else self._tell
        return await answered(call, lambda: answering(method, incoming, call), reply)

    async def _tell(self, method: str, incoming: Stream, call: GrpcCall) -> Any:
        """Answer a question about the server, a model or a region."""
        if method not in OPEN_METHODS:
            self._service.keys.check(call.authorization)
        kind, answer = self._methods.get(method) or self._regions.of(method, call)
        if method in WITHOUT_MESSAGE:
            return await answer(kind())
        data = await self._short.receive(incoming, announced_bytes(call.metadata))
        return await answer(parsed(data, kind))

    async def _infer(self, _: str, incoming: Stream, call: GrpcCall) -> messages.ModelInferResponse:
        observer = RequestObserver()
        self._service.keys.check(call.authorization)
        options = RequestOptions(
            call.request_id,
            timeout_s=timeout_s_of(call.metadata),
            priority=call.metadata.get("priority"),
            refused_before=call.metadata.get(REFUSED_HEADER),
            cache_control=call.joined(CACHE_CONTROL) if self._has_cache else None,
        )
        body = InferMessage(self._inference, self._receiver, incoming, call)
        answer = await self._inference.answer(body, options, observer)
        if isinstance(answer, Fault):
            call.refuse(answer)
            return messages.ModelInferResponse()
        with observer.stage("encode"):
            return infer_response_of(answer, is_raw=body.is_raw)

    async def _server_live(self, _: messages.ServerLiveRequest) -> messages.ServerLiveResponse:
        return messages.ServerLiveResponse(live=True)

    async def _server_ready(self, _: messages.ServerReadyRequest) -> messages.ServerReadyResponse:
        return messages.ServerReadyResponse(ready=await self._is_ready())

    async def _server_metadata(
        self, _: messages.ServerMetadataRequest
    ) -> messages.ServerMetadataResponse:
        has_memory = self._inference.shared_memory.is_on
        metadata = server_metadata(has_shared_memory=has_memory)
        return messages.ServerMetadataResponse(**asdict(metadata))

    async def _model_ready(
        self, request: messages.ModelReadyRequest
    ) -> messages.ModelReadyResponse:
        self._inference.models.find(request.name, request.version)
        return messages.ModelReadyResponse(ready=await self._is_ready())

    async def _model_metadata(
        self, request: messages.ModelMetadataRequest
    ) -> messages.ModelMetadataResponse:
        model = self._inference.models.find(request.name, request.version)
        return messages.ModelMetadataResponse(**asdict(model.metadata()))

    async def _model_statistics(
        self, request: messages.ModelStatisticsRequest
    ) -> messages.ModelStatisticsResponse:
        models, name = self._inference.models, None
        if request.name:
            name = models.find(request.name, request.version).name
        return messages.ModelStatisticsResponse(**asdict(self._inference.statistics.of(name)))

    async def _repository_index(
        self, _: messages.RepositoryIndexRequest
    ) -> messages.RepositoryIndexResponse:
        models = [asdict(entry) for entry in self._inference.models.index()]
        return messages.RepositoryIndexResponse(models=models)

    async def _is_ready(self) -> bool:
        """Whether every member answers; over HTTP that it does not is an error."""
        try:
            await self._service.check_ready()
        except TandemError:
            return False
        return True


class InferMessage:
    """The message of an inference call, which is still to come."""

    def __init__(
        self, inference: Inference, receiver: Receiver, incoming: Stream, call: GrpcCall
    ) -> None:
        self._inference, self._receiver = inference, receiver
        self._incoming, self._call = incoming, call
        self.is_raw = False  # whether its tensors are raw bytes, as the answer's are then

    async def read(self, share: Share) -> ModelRequest:
        """Return the request; see :class:`app.oip.inference.InferReader`."""
        announced = announced_bytes(self._call.metadata)
        share.expect(announced or 0)
        data = await self._receiver.receive(self._incoming, announced)
        share.grow(len(data))
        message = parsed(data, messages.ModelInferRequest)
        model = self._inference.models.find(message.model_name, message.model_version)
        request, regions = infer_request_of(message), None
        if request.uses_regions:
            memory = self._inference.shared_memory
            regions = memory.for_caller(is_local=is_local(self._call))
        self.is_raw = any(tensor.raw is not None or tensor.region for tensor in request.inputs)
        return ModelRequest(model, request, regions)


class OpenInferenceMethods(SharedMemoryMethods):
    """The methods as the ingress has them: Serve finds each, and ``grpc_context``, by its name."""

    _open_inference: OpenInferenceInterface

    async def ServerLive(self, incoming: Stream, grpc_context: RayServegRPCContext) -> Any:
        """Say that the Gateway lives."""
        return await self._open_inference.call("ServerLive", incoming, grpc_context)

    async def ServerReady(self, incoming: Stream, grpc_context: RayServegRPCContext) -> Any:
        """Say whether every member answers."""
        return await self._open_inference.call("ServerReady", incoming, grpc_context)

    async def ServerMetadata(self, incoming: Stream, grpc_context: RayServegRPCContext) -> Any:
        """Describe the server."""
        return await self._open_inference.call("ServerMetadata", incoming, grpc_context)

    async def ModelReady(self, incoming: Stream, grpc_context: RayServegRPCContext) -> Any:
        """Say whether a model answers."""
        return await self._open_inference.call("ModelReady", incoming, grpc_context)

    async def ModelMetadata(self, incoming: Stream, grpc_context: RayServegRPCContext) -> Any:
        """Describe a model."""
        return await self._open_inference.call("ModelMetadata", incoming, grpc_context)

    async def ModelInfer(self, incoming: Stream, grpc_context: RayServegRPCContext) -> Any:
        """Classify images."""
        return await self._open_inference.call(INFER, incoming, grpc_context)

    async def ModelStatistics(self, incoming: Stream, grpc_context: RayServegRPCContext) -> Any:
        """Say what models have answered."""
        return await self._open_inference.call("ModelStatistics", incoming, grpc_context)

    async def RepositoryIndex(self, incoming: Stream, grpc_context: RayServegRPCContext) -> Any:
        """List the models."""
        return await self._open_inference.call("RepositoryIndex", incoming, grpc_context)
