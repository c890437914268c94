"""The Open Inference Protocol over gRPC: the methods of ``inference.GRPCInferenceService``."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.errors import BadRegionError
from app.graph.observer import RequestObserver
from app.grpc import open_inference_pb2 as messages
from app.grpc.call import GrpcCall, answered
from app.grpc.infer_messages import infer_request_of, infer_response_of
from app.grpc.receiver import Receiver
from app.grpc.request import parsed
from app.grpc.servicer import OPEN_INFERENCE, OPEN_INFERENCE_METHODS, Message
from app.messages import Fault
from app.oip.inference import Inference, ModelRequest
from app.oip.models import server_metadata
from app.oip.shared_memory import NO_CUDA, for_caller
from models.errors import TandemError

Stream = gRPCInputStream[Message]
OPEN_METHODS = frozenset({"ServerLive", "ServerReady"})  # load balancers check these without a key
# Their messages have no content, so they are answered without reading one.
WITHOUT_MESSAGE = OPEN_METHODS | {"ServerMetadata"}


class OpenInferenceInterface:
    """Answers calls with ``inference``; an error is the context's status, with an empty reply."""

    def __init__(self, inference: Inference, receiver: Receiver | None = None) -> None:
        self._inference, self._service = inference, inference.service
        self._receiver = receiver or Receiver(self._service.settings)

    async def call(self, method: str, incoming: Stream, context: RayServegRPCContext) -> Any:
        call = GrpcCall(OPEN_INFERENCE, method, context)
        reply = getattr(messages, f"{method}Response")
        answering = self._infer if method == "ModelInfer" else self._describe
        return await answered(call, lambda: answering(method, incoming, call), reply)

    async def _describe(self, method: str, incoming: Stream, call: GrpcCall) -> Any:
        """Answer a question about the server, a model or a region."""
        if method not in OPEN_METHODS:
            self._service.keys.check(call.authorization)
        request = getattr(messages, f"{method}Request")()
        if method not in WITHOUT_MESSAGE:
            data = await self._receiver.receive_short(incoming, call.announced_bytes)
            request = parsed(data, type(request))
        if method.startswith("Repository"):
            fields = await self._of_repository(method, request, call)
        elif "SharedMemory" in method:
            fields = self._of_region(method, request, call)
        elif method.startswith("Model"):
            fields = await self._of_model(method, request)
        else:
            fields = await self._of_server(method)
        return getattr(messages, f"{method}Response")(**fields)

    async def _infer(self, _: str, incoming: Stream, call: GrpcCall) -> messages.ModelInferResponse:
        observer, inference = RequestObserver(), self._inference
        self._service.keys.check(call.authorization)
        options = call.options(self._service.settings.traffic_header)
        with inference.admit(options, observer) as admitted:
            async with admitted.arriving():
                data = await self._receiver.receive_into(
                    admitted.share, incoming, call.announced_bytes
                )
                asked = self._asked(data, call)
                await admitted.ask(asked)
            answer = await admitted.answer()
        if isinstance(answer, Fault):
            call.refuse(answer)
            return messages.ModelInferResponse()
        # Answers are raw bytes if the tensors of the request are.
        is_raw = any(tensor.raw is not None or tensor.region for tensor in asked.request.inputs)
        start_ms = observer.elapsed_ms()
        response = infer_response_of(answer, is_raw=is_raw)
        observer.stage_ended("encode", start_ms)
        return response

    def _asked(self, data: bytes, call: GrpcCall) -> ModelRequest:
        """Return the request in a message, and the model that it names."""
        message = parsed(data, messages.ModelInferRequest)
        model = self._inference.models.find(message.model_name, message.model_version)
        request, regions = infer_request_of(message), None
        if request.uses_regions:
            regions = for_caller(self._inference.regions, is_local=call.is_local)
        return ModelRequest(model, request, regions)

    async def _of_server(self, method: str) -> dict[str, Any]:
        """Return the fields of a reply about the server."""
        if method == "ServerLive":
            return {"live": True}
        if method == "ServerReady":
            return {"ready": await _is_ready(self._service.check_all_ready())}
        has_memory = self._inference.regions is not None
        return asdict(server_metadata(has_shared_memory=has_memory))

    async def _of_repository(self, method: str, request: Any, call: GrpcCall) -> dict[str, Any]:
        """Load or unload a set, or list the repository; return the reply's fields."""
        repository = self._inference.repository
        if method == "RepositoryIndex":
            entries = repository.index(self._inference.models, only_ready=request.ready)
            return {"models": [asdict(entry) for entry in entries]}
        change = repository.load if method == "RepositoryModelLoad" else repository.unload
        await change(request.model_name, request.parameters, is_local=call.is_local)
        return {}

    async def _of_model(self, method: str, request: Any) -> dict[str, Any]:
        """Return the fields of a reply about a model, or about all models."""
        if method == "ModelStatistics" and not request.name:
            return asdict(self._inference.statistics())
        model = self._inference.models.find(request.name, request.version)
        if method == "ModelReady":
            return {"ready": await _is_ready(self._service.of_set(model.model_set).check_ready())}
        if method == "ModelMetadata":
            return asdict(model.metadata())
        return asdict(self._inference.statistics(model))

    def _of_region(self, method: str, request: Any, call: GrpcCall) -> dict[str, Any]:
        """Return the fields of a reply about regions of shared memory."""
        if method.startswith("Cuda"):  # there are none; clients unregister them at their start
            if method == "CudaSharedMemoryRegister":
                raise BadRegionError(NO_CUDA)
            return {}
        regions = for_caller(self._inference.regions, is_local=call.is_local)
        if method == "SystemSharedMemoryStatus":
            region = messages.SystemSharedMemoryStatusResponse.RegionStatus
            return {"regions": {r.name: region(**asdict(r)) for r in regions.status(request.name)}}
        if method == "SystemSharedMemoryRegister":
            regions.register(request.name, request.key, request.offset, request.byte_size)
        else:
            regions.unregister(request.name)
        return {}


async def _is_ready(checking: Awaitable[None]) -> bool:
    """Whether every member answers; the protocol's gRPC form is False, where HTTP has an error."""
    try:
        await checking
    except TandemError:
        return False
    return True


def _method(name: str) -> Callable[..., Awaitable[Any]]:
    async def answer(
        self: "OpenInferenceMethods", incoming: Stream, grpc_context: RayServegRPCContext
    ) -> Any:
        return await self._open_inference.call(name, incoming, grpc_context)

    answer.__name__ = name
    return answer


class OpenInferenceMethods:
    """The methods of the ingress: Serve finds each, and ``grpc_context``, by name."""

    _open_inference: OpenInferenceInterface


for _name in OPEN_INFERENCE_METHODS:
    setattr(OpenInferenceMethods, _name, _method(_name))
