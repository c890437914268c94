"""The Open Inference Protocol over gRPC: the methods of ``inference.GRPCInferenceService``.

It reads ``ModelInferRequest`` and renders ``ModelInferResponse``, with raw or typed contents.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.answers import Fault
from app.changes import check_change
from app.errors import BadRegionError, BadTensorError
from app.grpc import open_inference_pb2 as messages
from app.grpc.call import (
    OPEN_INFERENCE,
    OPEN_INFERENCE_METHODS,
    GrpcCall,
    Message,
    answered,
    parsed,
    stream_method,
)
from app.grpc.interface import Receiver
from app.oip.bodies import MAX_TENSORS, InferAnswer, OutputTensor
from app.oip.inference import Inference, ModelRequest
from app.oip.models import ServedModel, server_metadata
from app.oip.regions import NO_CUDA, for_caller
from app.oip.tensors import (
    InferRequest,
    RegionSlice,
    Tensor,
    checked_id,
    checked_tensor,
    has_base64,
    region_slice,
    requested_output,
    shown,
)
from app.queueing.admission import Share
from app.telemetry.metrics import RequestObserver
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
            call.check(self._service.keys)
        check_change(
            f"{OPEN_INFERENCE} {method}",
            call.sender,
            call.caller,
            has_keys=bool(self._service.keys),
            origins=self._service.settings.allowed_origins,
        )
        request = getattr(messages, f"{method}Request")()
        if method not in WITHOUT_MESSAGE:
            data = await self._receiver.receive_short(incoming, call.announced_bytes)
            request = parsed(data, type(request))
        if method.startswith("Repository"):
            fields = await self._of_repository(method, request)
        elif "SharedMemory" in method:
            fields = self._of_region(method, request, call)
        elif method.startswith("Model"):
            fields = await self._of_model(method, request)
        else:
            fields = await self._of_server(method)
        return getattr(messages, f"{method}Response")(**fields)

    async def _infer(self, _: str, incoming: Stream, call: GrpcCall) -> messages.ModelInferResponse:
        observer, is_raw = RequestObserver(), False
        call.check(self._service.keys)

        async def read(share: Share) -> ModelRequest:
            nonlocal is_raw  # answers are raw bytes if the tensors of the request are
            data = await self._receiver.receive_into(share, incoming, call.announced_bytes)
            model, version, request = await self._receiver.read(data, parsed_infer)
            asked = self._asked(self._inference.models.find(model, version), request, call)
            is_raw = any(tensor.raw is not None or tensor.region for tensor in asked.request.inputs)
            return asked

        options = call.options(self._service.settings.traffic_header)
        answer = await self._inference.exchange(options, observer, read)
        if isinstance(answer, Fault):
            call.refuse(answer)
            return messages.ModelInferResponse()
        start_ms = observer.elapsed_ms()
        response = infer_response_of(answer, is_raw=is_raw)
        observer.stage_ended("encode", start_ms)
        return response

    def _asked(self, model: ServedModel, request: InferRequest, call: GrpcCall) -> ModelRequest:
        regions = None
        if request.uses_regions:
            regions = for_caller(self._inference.regions, is_local=call.sender.is_local)
        return ModelRequest(model, request, regions)

    async def _of_server(self, method: str) -> dict[str, Any]:
        """Return the fields of a reply about the server."""
        if method == "ServerLive":
            return {"live": True}
        if method == "ServerReady":
            return {"ready": await _is_ready(self._service.check_all_ready())}
        has_memory = self._inference.regions is not None
        return asdict(server_metadata(has_shared_memory=has_memory))

    async def _of_repository(self, method: str, request: Any) -> dict[str, Any]:
        """Load or unload a set, or list the repository; return the reply's fields."""
        repository = self._inference.repository
        if method == "RepositoryIndex":
            entries = repository.index(self._inference.models, only_ready=request.ready)
            return {"models": [asdict(entry) for entry in entries]}
        change = repository.load if method == "RepositoryModelLoad" else repository.unload
        await change(request.model_name, request.parameters)
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
        if method == "ModelConfig":
            return {"config": asdict(self._inference.configuration(model))}
        return asdict(self._inference.statistics(model))

    def _of_region(self, method: str, request: Any, call: GrpcCall) -> dict[str, Any]:
        """Return the fields of a reply about regions of shared memory."""
        if method.startswith("Cuda"):  # there are none; clients unregister them at their start
            if method == "CudaSharedMemoryRegister":
                raise BadRegionError(NO_CUDA)
            return {}
        regions = for_caller(self._inference.regions, is_local=call.sender.is_local)
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


class OpenInferenceMethods:
    """The methods of the ingress: Serve finds each, and ``grpc_context``, by name."""

    _open_inference: OpenInferenceInterface


for _name in OPEN_INFERENCE_METHODS:
    setattr(OpenInferenceMethods, _name, stream_method("_open_inference", _name))
# The field of each datatype's typed contents; FP16 and BF16 have none.
OWN_FIELD = ("BOOL", "INT64", "UINT64", "FP32", "FP64", "BYTES")
CONTENTS = {datatype: f"{datatype.lower()}_contents" for datatype in OWN_FIELD}
CONTENTS |= dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents")
CONTENTS |= dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents")


def _with_packed_contents() -> type[messages.ModelInferRequest]:
    """Return ``ModelInferRequest`` with typed contents as bytes, each packed field one entry.

    Protobuf itself makes up to 8 bytes of a number in one, before anything can check the shape.
    """
    file, pool = FileDescriptorProto(), DescriptorPool()
    messages.DESCRIPTOR.CopyToProto(file)
    (contents,) = (each for each in file.message_type if each.name == "InferTensorContents")
    for field in contents.field:
        field.type = field.TYPE_BYTES
    pool.Add(file)
    name = messages.ModelInferRequest.DESCRIPTOR.full_name
    kind: type[messages.ModelInferRequest] = GetMessageClass(pool.FindMessageTypeByName(name))
    return kind


REQUEST = _with_packed_contents()


def parsed_infer(data: bytes) -> tuple[str, str, InferRequest]:
    """Parse a ``ModelInferRequest``; return the model's name and version, and the request.

    Raises:
        BadParameterError: it does not parse, or has too many fields.
        BadTensorError: its parts do not fit.
    """
    message = parsed(data, REQUEST)
    return message.model_name, message.model_version, infer_request_of(message)


def infer_request_of(message: messages.ModelInferRequest) -> InferRequest:
    """Return the request of a :data:`REQUEST`.

    Raises :class:`BadTensorError` if its parts do not fit.
    """
    if max(len(message.inputs), len(message.outputs)) > MAX_TENSORS:
        raise BadTensorError(f"the request has too many tensors; the limit is {MAX_TENSORS} each")
    return InferRequest(
        _inputs(message),
        tuple(requested_output(o.name, _parameters(o.parameters)) for o in message.outputs),
        _parameters(message.parameters),
        checked_id(message.id),
    )


def _inputs(message: messages.ModelInferRequest) -> tuple[Tensor, ...]:
    """Return the inputs; raw contents belong, in order, to the inputs that have no region."""
    regions = [
        region_slice(f"input {shown(each.name)}", _parameters(each.parameters))
        for each in message.inputs
    ]
    raw, num_sent = message.raw_input_contents, regions.count(None)
    if raw and len(raw) != num_sent:
        raise BadTensorError(
            f"raw_input_contents has {len(raw)} entries for {num_sent} inputs; give each one"
        )
    parts = iter(raw)
    return tuple(
        _input(each, next(parts, None) if region is None else None, region)
        for each, region in zip(message.inputs, regions, strict=True)
    )


def _input(
    message: messages.ModelInferRequest.InferInputTensor,
    raw: bytes | None,
    region: RegionSlice | None,
) -> Tensor:
    where = f"input {shown(message.name)}"
    filled = [field.name for field, _ in message.contents.ListFields()]
    name, datatype, shape = message.name, message.datatype, list(message.shape)
    is_base64 = has_base64(_parameters(message.parameters))
    if region is not None:
        if filled:
            raise BadTensorError(f"{where} has data and a region; give one of them")
        return checked_tensor(name, datatype, shape, region=region, is_base64=is_base64)
    if raw is not None:
        if filled:
            raise BadTensorError(f"{where} has contents and raw_input_contents; give one of them")
        return checked_tensor(name, datatype, shape, raw=raw, is_base64=is_base64)
    tensor = checked_tensor(name, datatype, shape)
    expected = CONTENTS.get(datatype)
    if expected is None:
        raise BadTensorError(f"{where}: {datatype} goes as raw_input_contents only")
    if wrong := [field for field in filled if field != expected]:
        raise BadTensorError(f"{where}: {datatype} goes into {expected}, and {wrong[0]} is filled")
    values = list(getattr(message.contents, expected))
    if datatype == "BYTES":
        return replace(tensor, values=values, is_base64=is_base64)
    return replace(tensor, packed=b"".join(values))


def _parameters(sent: Mapping[str, messages.InferParameter]) -> dict[str, Any]:
    """Return parameters by name; one without a value is left out."""
    return {
        name: getattr(parameter, choice)
        for name, parameter in sent.items()
        if (choice := parameter.WhichOneof("parameter_choice"))
    }


def infer_response_of(answer: InferAnswer, *, is_raw: bool) -> messages.ModelInferResponse:
    """Return an answer as a message, with raw or typed contents."""
    return messages.ModelInferResponse(
        model_name=answer.model_name,
        model_version=answer.model_version,
        id=answer.id,
        parameters=_named(answer.parameters),
        outputs=[_tensor(output, is_raw=is_raw) for output in answer.outputs],
        # An output in shared memory has an empty entry, since clients count the entries.
        raw_output_contents=[
            b"" if output.region else output.packed() for output in answer.outputs if is_raw
        ],
    )


def _named(parameters: Mapping[str, Any]) -> dict[str, messages.InferParameter]:
    fields = {bool: "bool_param", int: "int64_param", str: "string_param"}
    return {
        name: messages.InferParameter(**{fields[type(value)]: value})
        for name, value in parameters.items()
    }


def _tensor(output: OutputTensor, *, is_raw: bool) -> messages.ModelInferResponse.InferOutputTensor:
    message = messages.ModelInferResponse.InferOutputTensor(
        name=output.name,
        datatype=output.datatype,
        shape=output.shape,
        parameters=_named(output.parameters),
    )
    if is_raw or output.region:
        return message
    if isinstance(output.contents, np.ndarray):
        message.contents.fp32_contents.extend(output.contents.ravel().tolist())
    else:
        message.contents.bytes_contents.extend(output.contents)
    return message
