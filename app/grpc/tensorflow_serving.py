"""TensorFlow Serving over gRPC: ``Predict``, ``GetModelMetadata`` and ``GetModelStatus``.

A ``PredictRequest`` is converted to a request of the Open Inference Protocol. Its answer has typed
contents, which clients read by name (``float_val``).
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from google.protobuf import json_format
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.wrappers_pb2 import Int64Value
from ray.serve.grpc_util import RayServegRPCContext

from app.answers import Fault
from app.errors import BadTensorError
from app.grpc import tensorflow_serving_pb2 as messages
from app.grpc.call import TENSORFLOW_METHODS, GrpcCall, answered, parsed, stream_method
from app.grpc.interface import Receiver
from app.grpc.open_inference import Stream
from app.oip.bodies import (
    MAX_TENSORS,
    METHOD,
    SIGNATURE,
    TYPES,
    InferAnswer,
    OutputTensor,
    status_of,
)
from app.oip.inference import Inference, ModelRequest
from app.oip.models import FIRST_VERSION, ServedModel, TensorMetadata
from app.oip.tensors import InferRequest, RequestedOutput, Tensor, checked_tensor, shown
from app.queueing.admission import Share
from app.telemetry.metrics import RequestObserver

PREDICT = "Predict"
SIGNATURE_DEF = "signature_def"
# Of types whose names differ from the Open Inference Protocol's.
DATATYPES = {name: datatype for datatype, name in TYPES.items()}
DATATYPES |= {"DT_DOUBLE": "FP64", "DT_HALF": "FP16", "DT_BFLOAT16": "BF16"}


class TensorFlowInterface:
    """Answers calls with ``inference``; an error is the context's status, with an empty reply."""

    def __init__(self, inference: Inference, receiver: Receiver | None = None) -> None:
        self._inference, self._service = inference, inference.service
        self._receiver = receiver or Receiver(self._service.settings)

    async def call(self, method: str, incoming: Stream, context: RayServegRPCContext) -> Any:
        call = GrpcCall(TENSORFLOW_METHODS[method], method, context)
        answering = self._predict if method == PREDICT else self._describe
        reply = getattr(messages, f"{method}Response")
        return await answered(call, lambda: answering(method, incoming, call), reply)

    async def _describe(self, method: str, incoming: Stream, call: GrpcCall) -> Any:
        """Answer a question about a model."""
        call.check(self._service.keys)
        data = await self._receiver.receive_short(incoming, call.announced_bytes)
        request = parsed(data, getattr(messages, f"{method}Request"))
        model = self._model_of(request.model_spec)
        if method == "GetModelMetadata":
            return metadata_of(model, request.metadata_field)
        await self._service.of_set(model.model_set).check_ready()
        versions = asdict(status_of(model))["model_version_status"]
        status = {"error_code": 0}  # by number, for it is an enum of TensorFlow's
        fields = {"model_version_status": [each | {"status": status} for each in versions]}
        return json_format.ParseDict(fields, messages.GetModelStatusResponse())

    async def _predict(self, _: str, incoming: Stream, call: GrpcCall) -> messages.PredictResponse:
        observer = RequestObserver()
        call.check(self._service.keys)

        async def read(share: Share) -> ModelRequest:
            data = await self._receiver.receive_into(share, incoming, call.announced_bytes)
            spec, request = await self._receiver.read(data, parsed_predict)
            return ModelRequest(self._model_of(spec), request)

        options = call.options(self._service.settings.traffic_header)
        answer = await self._inference.exchange(options, observer, read)
        if isinstance(answer, Fault):
            call.refuse(answer)
            return messages.PredictResponse()
        start_ms = observer.elapsed_ms()
        response = predict_response_of(answer)
        observer.stage_ended("encode", start_ms)
        return response

    def _model_of(self, spec: messages.ModelSpec) -> ServedModel:
        """Return the model that is asked for; raises as :meth:`Models.find` does."""
        version = spec.version_label or str(spec.version.value)
        return self._inference.models.find(spec.name, version)


class TensorFlowMethods:
    """The methods of the ingress: Serve finds each, and ``grpc_context``, by name."""

    _tensorflow: TensorFlowInterface


for _name in TENSORFLOW_METHODS:
    setattr(TensorFlowMethods, _name, stream_method("_tensorflow", _name))


def _spec_of(name: str) -> messages.ModelSpec:
    version = Int64Value(value=int(FIRST_VERSION))
    return messages.ModelSpec(name=name, version=version, signature_name=SIGNATURE)


def metadata_of(
    model: ServedModel, asked: list[str] | None = None
) -> messages.GetModelMetadataResponse:
    """Return a model's signature; raise :class:`BadTensorError` if other metadata are asked for."""
    if others := set(asked or ()) - {SIGNATURE_DEF}:
        raise BadTensorError(f"metadata_field is {shown(min(others))}; there is {SIGNATURE_DEF}")
    described, packed = model.metadata(), AnyMessage()
    signature = messages.SignatureDef(
        inputs={each.name: _info_of(each) for each in described.inputs},
        outputs={each.name: _info_of(each) for each in described.outputs},
        method_name=METHOD,
    )
    packed.Pack(messages.SignatureDefMap(signature_def={SIGNATURE: signature}))
    return messages.GetModelMetadataResponse(
        model_spec=_spec_of(model.name), metadata={SIGNATURE_DEF: packed}
    )


def _info_of(tensor: TensorMetadata) -> messages.TensorInfo:
    return messages.TensorInfo(
        name=tensor.name, dtype=TYPES[tensor.datatype], tensor_shape=_shape_of(tensor.shape)
    )


def _shape_of(sizes: list[int] | tuple[int, ...]) -> messages.TensorShapeProto:
    return messages.TensorShapeProto(dim=[{"size": size} for size in sizes])


def parsed_predict(data: bytes) -> tuple[messages.ModelSpec, InferRequest]:
    """Parse a ``PredictRequest``.

    Raises:
        BadParameterError: it does not parse, or has too many fields.
        BadTensorError: its parts do not fit.
    """
    message = parsed(data, messages.PredictRequest)
    if (name := message.model_spec.signature_name or SIGNATURE) != SIGNATURE:
        raise BadTensorError(f"signature_name is {shown(name)}; there is {SIGNATURE}")
    if max(len(message.inputs), len(message.output_filter)) > MAX_TENSORS:
        raise BadTensorError(f"the request has too many tensors; the limit is {MAX_TENSORS} each")
    return message.model_spec, InferRequest(
        tuple(_input(name, tensor) for name, tensor in message.inputs.items()),
        tuple(RequestedOutput(name) for name in message.output_filter),
    )


def _input(name: str, message: messages.TensorProto) -> Tensor:
    """Return an input; a DT_STRING without dimensions is a single file."""
    known = messages.DataType.DESCRIPTOR.values_by_number.get(message.dtype)
    dtype = known.name if known else str(message.dtype)
    datatype = DATATYPES.get(dtype, dtype.removeprefix("DT_"))
    shape = [dim.size for dim in message.tensor_shape.dim]
    if datatype == "BYTES":
        if message.tensor_content:
            raise BadTensorError(f"input {shown(name)}: DT_STRING goes into string_val")
        files = list(message.string_val)
        return checked_tensor(name, datatype, shape or [len(files)], values=files)
    if message.tensor_content:
        return checked_tensor(name, datatype, shape, raw=message.tensor_content)
    return checked_tensor(name, datatype, shape, values=list(message.int_val))


def predict_response_of(answer: InferAnswer) -> messages.PredictResponse:
    """Return an answer as a message."""
    outputs: Mapping[str, messages.TensorProto] = {
        output.name: _output(output) for output in answer.outputs
    }
    return messages.PredictResponse(outputs=outputs, model_spec=_spec_of(answer.model_name))


def _output(output: OutputTensor) -> messages.TensorProto:
    tensor = messages.TensorProto(
        dtype=TYPES[output.datatype], tensor_shape=_shape_of(output.shape)
    )
    if isinstance(output.contents, np.ndarray):
        tensor.float_val.extend(output.contents.ravel().tolist())
    else:
        tensor.string_val.extend(output.contents)
    return tensor
