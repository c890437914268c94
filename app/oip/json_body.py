"""Parses the body of an inference request over HTTP: JSON, followed by the binary tensors.

The header Inference-Header-Content-Length has the length of the JSON. Without it all is JSON. With
0 the body is raw: a single encoded image.
"""

import gc
from collections.abc import Mapping
from typing import Any

import orjson

from app.errors import BadTensorError, BodyTooLargeError
from app.oip.models import IMAGE
from app.oip.request import (
    InferRequest,
    RequestedOutput,
    checked_id,
    has_base64,
    region_slice,
    requested_output,
    truth,
    whole_number,
)
from app.oip.tensors import Tensor, checked_tensor, shown

HEADER_LENGTH = "inference-header-content-length"
LENGTH_HINT = (
    "with binary tensors the header Inference-Header-Content-Length says where the JSON ends"
)
# JSON is parsed without a break on the event loop, and takes many times its size in memory.
MAX_JSON_BYTES = 2 * 2**20
MAX_VALUES = 2**14  # of longer JSON, counted by these characters, which base64 lacks:
BEFORE_VALUES = (b",", b"[", b"{")
MAX_TENSORS = 16  # inputs and outputs each


def parse_request(body: bytes, header_length: str | None) -> InferRequest:
    """Return the request in a body without content coding; ``header_length`` is the header.

    Raises:
        BadTensorError: the body is not a request of the protocol.
        BodyTooLargeError: its JSON is too long.

    """
    length = len(body) if header_length is None else _header_length(header_length, len(body))
    if header_length is not None and length == 0:
        image = checked_tensor(IMAGE, "BYTES", (1,), values=[body])
        return InferRequest((image,), parameters={"binary_data_output": True})
    fields = parsed_object(parsed_json(body[:length]), "the request")
    parameters = parsed_object(fields.get("parameters", {}), "parameters")
    is_binary = truth(parameters, "binary_data_output")
    return InferRequest(
        _inputs(fields, memoryview(body)[length:]),
        tuple(_output(each, is_binary) for each in _list(fields, "outputs", [])),
        parameters,
        checked_id(fields.get("id", "")),
    )


def _header_length(text: str, body_bytes: int) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise BadTensorError(
            f"Inference-Header-Content-Length is {shown(text)}; it is the number of bytes of JSON"
        )
    if len(text) > 18 or int(text) > body_bytes:
        raise BadTensorError(
            f"Inference-Header-Content-Length is {text[:18]}, and the body has {body_bytes} bytes"
        )
    return int(text)


def parsed_json(text: bytes, hint: str = LENGTH_HINT) -> Any:
    """Return the parsed JSON; ``hint`` is the advice about a text that is not JSON.

    Raises:
        BadTensorError: the text is not JSON.
        BodyTooLargeError: it is long and has many values.

    """
    if len(text) > MAX_JSON_BYTES and sum(map(text.count, BEFORE_VALUES)) > MAX_VALUES:
        raise BodyTooLargeError(
            f"the request has {len(text)} bytes of JSON, the limit is {MAX_JSON_BYTES} for more "
            f"than {MAX_VALUES} values; send files, or tensors in their binary form "
            "(binary_data_size, Inference-Header-Content-Length)"
        )
    was_enabled = gc.isenabled()
    gc.disable()  # it would traverse all new lists again and again
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadTensorError(
            f"the request is no JSON: {error.msg} at character {error.pos}; {hint}"
        ) from error
    finally:
        if was_enabled:
            gc.enable()


def parsed_object(value: Any, what: str) -> Mapping[str, Any]:
    """Return a value that is an object; raise :class:`BadTensorError` for other values."""
    if not isinstance(value, dict):
        raise BadTensorError(f"{what} is {shown(value)}; it is an object")
    return value


def _list(fields: Mapping[str, Any], name: str, default: list[Any] | None = None) -> list[Any]:
    value = fields.get(name, default)
    if not isinstance(value, list):
        raise BadTensorError(f"{name} is {shown(value)}; it is a list")
    if len(value) > MAX_TENSORS:
        raise BadTensorError(f"the request has {len(value)} {name}, the limit is {MAX_TENSORS}")
    return value


def _inputs(fields: Mapping[str, Any], binary: memoryview) -> tuple[Tensor, ...]:
    """Return the inputs; binary inputs take their bytes one after another."""
    tensors = []
    for each in _list(fields, "inputs"):
        tensor, used = _input(parsed_object(each, "an input"), binary)
        tensors.append(tensor)
        binary = binary[used:]
    if len(binary):
        raise BadTensorError(
            f"{len(binary)} bytes are left over after the inputs; the sum of binary_data_size "
            "must be what comes after the JSON"
        )
    return tuple(tensors)


def _input(fields: Mapping[str, Any], binary: memoryview) -> tuple[Tensor, int]:
    name, datatype, shape = (fields.get(key) for key in ("name", "datatype", "shape"))
    where = f"input {shown(name)}"
    parameters = parsed_object(fields.get("parameters", {}), f"{where}: parameters")
    size, region = whole_number(parameters, "binary_data_size"), region_slice(where, parameters)
    is_base64 = has_base64(parameters)
    if region is not None:
        if size is not None or "data" in fields:
            raise BadTensorError(f"{where} has data and a region; give one of them")
        return checked_tensor(name, datatype, shape, region=region, is_base64=is_base64), 0
    if size is None:
        if "data" not in fields:
            raise BadTensorError(f"{where} has neither data nor binary_data_size; give one of them")
        values = fields["data"]
        return checked_tensor(name, datatype, shape, values=values, is_base64=is_base64), 0
    if "data" in fields:
        raise BadTensorError(f"{where} has both data and binary_data_size; give one of them")
    if not 0 <= size <= len(binary):
        raise BadTensorError(
            f"{where}: binary_data_size is {size}, and {len(binary)} bytes are left of the body"
        )
    raw = binary[:size]
    return checked_tensor(name, datatype, shape, raw=raw, is_base64=is_base64), size


def _output(each: Any, is_binary: bool) -> RequestedOutput:
    fields = parsed_object(each, "an output")
    parameters = parsed_object(fields.get("parameters", {}), "an output's parameters")
    return requested_output(fields.get("name"), parameters, is_binary=is_binary)
