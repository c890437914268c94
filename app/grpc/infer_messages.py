"""Reads ``ModelInferRequest`` and renders ``ModelInferResponse``, with raw and typed contents."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from app.errors import BadTensorError
from app.grpc import open_inference_pb2 as messages
from app.oip.answer import InferAnswer, OutputTensor
from app.oip.json_body import MAX_TENSORS
from app.oip.request import (
    InferRequest,
    RequestedOutput,
    checked_id,
    has_base64,
    region_slice,
    requested_output,
)
from app.oip.tensors import RegionSlice, Tensor, checked_tensor, shown

# The field of each datatype's typed contents; FP16 and BF16 have none.
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def infer_request_of(message: messages.ModelInferRequest) -> InferRequest:
    """Return a message's request; raise :class:`BadTensorError` if its parts do not fit."""
    if max(len(message.inputs), len(message.outputs)) > MAX_TENSORS:
        raise BadTensorError(f"the request has too many tensors; the limit is {MAX_TENSORS} each")
    return InferRequest(
        _inputs(message),
        tuple(_output(each) for each in message.outputs),
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
    return checked_tensor(name, datatype, tensor.shape, values=values, is_base64=is_base64)


def _output(message: messages.ModelInferRequest.InferRequestedOutputTensor) -> RequestedOutput:
    return requested_output(message.name, _parameters(message.parameters))


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
