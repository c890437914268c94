"""Inference over HTTP: requests parsed from their bodies, and answers rendered as bodies.

In the Open Inference Protocol both are JSON, followed by the binary tensors. The header
Inference-Header-Content-Length has the length of the JSON. Without it all is JSON. With 0 the body
is raw: a single encoded image. Outputs are probabilities, labels, and Triton's classification
strings.

In TensorFlow Serving's API, whose REST form KServe's V1 protocol shares, a request of ``:predict``
has images by rows or by columns. Rows are ``{"instances": [{"b64": "..."}]}``, or ``{"instances":
[{"image": {"b64": "..."}}]}``; columns are ``{"inputs": {"image": [{"b64": "..."}]}}``, or
``pixels`` as nested numbers. It is converted to a request of the Open Inference Protocol, and
answered in the form in which it came.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from app.answers import Classified
from app.errors import BadRegionError, BadTensorError, BodyTooLargeError, NotReadyError
from app.oip.models import (
    EMBEDDING,
    FIRST_VERSION,
    IMAGE,
    LABEL,
    OUTPUTS,
    PIXELS,
    PROBABILITIES,
    ModelReady,
    ServedModel,
    TensorMetadata,
)
from app.oip.regions import Regions
from app.oip.tensors import (
    REGION,
    REGION_OFFSET,
    REGION_SIZE,
    InferRequest,
    RegionSlice,
    RequestedOutput,
    Tensor,
    checked_id,
    checked_tensor,
    has_base64,
    packed_elements,
    region_slice,
    requested_output,
    shown,
    truth,
    whole_number,
)
from models.ensemble import AnswerRule, top_k

HEADER_LENGTH = "inference-header-content-length"
LENGTH_HINT = (
    "with binary tensors the header Inference-Header-Content-Length says where the JSON ends"
)
# JSON is parsed without a break on the event loop, and takes many times its size in memory.
MAX_JSON_BYTES = 2 * 2**20
MAX_VALUES = 2**14  # of longer JSON, counted by these characters, which base64 lacks:
BEFORE_VALUES = (b",", b"[", b"{")
MAX_TENSORS = 16  # inputs and outputs each
PROBABILITY_BYTES = 4  # FP32
Images = Sequence[Classified]
# TensorFlow Serving's API.
EXPECTED = '{"instances": [{"b64": "..."}]}, a file in base64 for each image'
BY_COLUMN = '{"inputs": {"image": [{"b64": "..."}]}}, a file in base64 for each image'
SIGNATURE, METHOD = "serving_default", "tensorflow/serving/predict"
TYPES = {"BYTES": "DT_STRING", "UINT8": "DT_UINT8", "FP32": "DT_FLOAT"}
STATUS: dict[str, str] = {"error_code": "OK", "error_message": ""}
AVAILABLE = "AVAILABLE"


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
    is_binary, inputs = truth(parameters, "binary_data_output"), memoryview(body)[length:]
    return InferRequest(
        _inputs(fields, inputs),
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
    has_data = "data" in fields
    if region is not None:
        if size is not None or has_data:
            raise BadTensorError(f"{where} has data and a region; give one of them")
        return checked_tensor(name, datatype, shape, region=region, is_base64=is_base64), 0
    if has_data is (size is not None):
        which = "both data and" if has_data else "neither data nor"
        raise BadTensorError(f"{where} has {which} binary_data_size; give one of them")
    if size is None:
        values = fields["data"]
        return checked_tensor(name, datatype, shape, values=values, is_base64=is_base64), 0
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


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """An output: FP32 contents are an array of the tensor's shape, BYTES contents a list."""

    name: str
    shape: tuple[int, ...]
    contents: npt.NDArray[np.float32] | Sequence[bytes]
    is_binary: bool = False
    region: RegionSlice | None = None  # where the contents were written, in place of the answer

    @property
    def datatype(self) -> str:
        return "FP32" if isinstance(self.contents, np.ndarray) else "BYTES"

    @property
    def parameters(self) -> dict[str, str | int]:
        """The parameters that locate the contents, if they are in a region."""
        if self.region is None:
            return {}
        place: dict[str, str | int] = {REGION: self.region.region}
        place[REGION_SIZE] = self.region.byte_size
        return place | ({REGION_OFFSET: self.region.offset} if self.region.offset else {})

    def packed(self) -> bytes:
        if isinstance(self.contents, np.ndarray):
            return np.ascontiguousarray(self.contents, "<f4").tobytes()
        return packed_elements(self.contents)

    def values(self) -> list[Any]:
        """Return the contents for JSON: row-major, not nested."""
        if isinstance(self.contents, np.ndarray):
            flat: list[Any] = self.contents.ravel().tolist()
            return flat
        return [element.decode("utf-8", "replace") for element in self.contents]


@dataclass(frozen=True, slots=True)
class InferAnswer:
    """The requested outputs, in the request's order."""

    model_name: str
    model_version: str
    id: str
    outputs: tuple[OutputTensor, ...]
    parameters: dict[str, Any] = field(default_factory=dict)


def check_outputs_fit(
    request: InferRequest, model: ServedModel, num_images: int, regions: Regions | None
) -> None:
    """Check the shared-memory regions of outputs before anything is computed for them.

    Raises:
        UnknownRegionError, BadRegionError: a region is not as it was registered, or too small.
    """
    if regions is None:
        return
    needed = num_images * len(model.labels) * PROBABILITY_BYTES
    for output in request.outputs:
        if output.region is None:
            continue
        is_rows = output.name == PROBABILITIES and not output.num_classes
        if is_rows and output.region.byte_size < needed:
            raise BadRegionError(
                f"output {output.name} has {needed} bytes, and {output.region.byte_size} of shared "
                "memory are given to it; give it more"
            )
        regions.check(output.region)


def answer_of(request: InferRequest, model: ServedModel, images: Images) -> InferAnswer:
    """Return the requested outputs, with rows in the images' order."""
    more = () if request.embedding is None else (EMBEDDING,)
    names = (*OUTPUTS, *more)
    asked = request.outputs or [RequestedOutput(name, request.wants_binary) for name in names]
    parameters: dict[str, bool | str] = {}
    if missing := {
        name: why for image in images for name, why in (image.missing_members or {}).items()
    }:
        reasons = ", ".join(f"{name}: {why}" for name, why in missing.items())
        parameters = {"degraded": True, "missing_members": reasons}
    if model.member is None and all(image.sure is not None for image in images):
        parameters["sure"] = all(image.sure for image in images)
    if any(image.plan == "fast" for image in images):
        asked_members = dict.fromkeys(name for image in images for name in image.asked or ())
        parameters |= {"plan": "fast", "asked": ", ".join(asked_members)}
        if images[0].reason is not None:
            parameters["reason"] = images[0].reason
    if all(image.cached for image in images):
        parameters["cached"] = True
    outputs = tuple(_output_tensor(output, request, model, images) for output in asked)
    version = images[0].model_version if images else model.version
    return InferAnswer(model.name, version, request.id, outputs, parameters)


def _output_tensor(
    asked: RequestedOutput, request: InferRequest, model: ServedModel, images: Images
) -> OutputTensor:
    contents: npt.NDArray[np.float32] | list[bytes]
    shape: tuple[int, ...]
    if asked.name == LABEL:
        shape, contents = _labels(request, model, images)
    elif asked.num_classes:
        num_classes = min(asked.num_classes, len(model.labels))
        shape = (len(images), num_classes)
        best = (top_k(image.probabilities, model.labels, num_classes) for image in images)
        contents = [f"{p.probability:f}:{p.index}:{p.label}".encode() for row in best for p in row]
    else:
        field = "embedding" if asked.name == EMBEDDING else "probabilities"
        rows: list[Any] = [getattr(image, field) for image in images]
        if any(row is None for row in rows):
            raise NotReadyError(f"the member of the output {EMBEDDING} did not answer; try again")
        contents = np.stack(rows)  # (N, C) or (N, F) float32
        shape = contents.shape
    return OutputTensor(asked.name, shape, contents, asked.is_binary, asked.region)


def _labels(
    request: InferRequest, model: ServedModel, images: Images
) -> tuple[tuple[int, ...], list[bytes]]:
    """Return the shape and the labels, row by row.

    The shape is (N,) for the likeliest labels alone, (N, top_k), or in a multi-label set (N, K): K
    is the largest number of labels of an image, at least 1. Empty labels fill shorter rows.
    """
    rule = AnswerRule(model.labels, model.threshold).asked(request.threshold)
    most = request.top_k or (len(model.labels) if rule.is_multi_label else 1)
    rows = [[p.label for p in rule.predictions(i.probabilities, most)] for i in images]
    width = max(1, *map(len, rows))
    is_flat = not rule.is_multi_label and request.top_k is None
    return (len(images),) if is_flat else (len(images), width), [
        label.encode() for row in rows for label in (*row, *[""] * (width - len(row)))
    ]


def rendered(answer: InferAnswer) -> tuple[bytes, int | None]:
    """Return the body over HTTP and the number of its bytes that are JSON, or None if all are."""
    outputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for output in answer.outputs:
        fields = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if output.region is not None:
            outputs.append(fields | {"parameters": output.parameters})
        elif output.is_binary:
            parts.append(output.packed())
            outputs.append(fields | {"parameters": {"binary_data_size": len(parts[-1])}})
        else:
            outputs.append(fields | {"data": output.values()})
    head: dict[str, Any] = {"model_name": answer.model_name, "model_version": answer.model_version}
    if answer.id:
        head["id"] = answer.id
    if answer.parameters:
        head["parameters"] = answer.parameters
    text = orjson.dumps(head | {"outputs": outputs})
    return (b"".join((text, *parts)), len(text)) if parts else (text, None)


@dataclass(slots=True)
class VersionStatus:
    """The state of a version, which is available; otherwise the request is an error."""

    version: str
    state: str
    status: dict[str, str]


@dataclass(slots=True)
class ModelStatus(ModelReady):
    """A model's status, with the fields of KServe's V1 protocol."""

    model_version_status: list[VersionStatus]


def status_of(model: ServedModel) -> ModelStatus:
    """Return the status of a model that is ready."""
    version = VersionStatus(FIRST_VERSION, AVAILABLE, STATUS)
    return ModelStatus(model.name, ready=True, model_version_status=[version])


def metadata_of(model: ServedModel) -> dict[str, Any]:
    """Return a model's signature; names are TensorFlow Serving's and OpenVINO Model Server's."""
    described = model.metadata()
    spec = {"name": model.name, "version": FIRST_VERSION}
    signature = {
        "inputs": {each.name: _tensor_info(each) for each in described.inputs},
        "outputs": {each.name: _tensor_info(each) for each in described.outputs},
        "method_name": METHOD,
    }
    by_name = {SIGNATURE: signature}
    return {
        "model_spec": spec | {"signature_name": ""},
        "modelSpec": spec | {"signatureName": ""},
        "metadata": {"signature_def": {"signature_def": by_name, "signatureDef": by_name}},
    }


def _tensor_info(tensor: TensorMetadata) -> dict[str, Any]:
    dims = [{"size": str(size), "name": ""} for size in tensor.shape]
    shape = {
        "tensor_shape": {"dim": dims, "unknown_rank": False},
        "tensorShape": {"dim": dims, "unknownRank": False},
    }
    return {"name": tensor.name, "dtype": TYPES[tensor.datatype], **shape}


class Prediction:
    """A request of ``:predict``, whose answer has the request's form."""

    def __init__(self) -> None:
        self._is_by_column = False

    def parse(self, body: bytes, _: str | None = None) -> InferRequest:
        """Return the request in a body.

        Raises:
            BadTensorError: the body is not a request of this form.
            BodyTooLargeError: its JSON is too long.
        """
        fields = parsed_object(parsed_json(body, f"send {EXPECTED}"), "the request")
        self._is_by_column = "inputs" in fields
        if self._is_by_column and "instances" in fields:
            raise BadTensorError("the request has instances and inputs; give one of them")
        if (name := fields.get("signature_name") or SIGNATURE) != SIGNATURE:
            raise BadTensorError(f"signature_name is {shown(name)}; there is {SIGNATURE}")
        tensors = _columns(fields["inputs"]) if self._is_by_column else (_rows(fields),)
        parameters = parsed_object(fields.get("parameters", {}), "parameters")
        return InferRequest(tensors, parameters=parameters)

    def render(self, answer: InferAnswer) -> tuple[bytes, None]:
        """Return the body and None, since none of it is binary."""
        columns = {output.name: _values(output) for output in answer.outputs}
        of_all = {"parameters": answer.parameters} if answer.parameters else {}
        if self._is_by_column:
            return orjson.dumps({"outputs": columns} | of_all), None
        unfilled = (map(_without_filling, column) for column in columns.values())
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*unfilled, strict=True)]
        return orjson.dumps({"predictions": rows} | of_all), None


def _rows(fields: Mapping[str, Any]) -> Tensor:
    instances = fields.get("instances")
    if not isinstance(instances, list):
        raise BadTensorError(f"instances is {shown(instances)}; send {EXPECTED}")
    rows = [each[IMAGE] if _has_only(each, IMAGE) else each for each in instances]
    return _files(rows, "instance", EXPECTED)


def _has_only(value: Any, key: str) -> bool:
    return isinstance(value, dict) and value.keys() == {key}


def _columns(inputs: Any) -> tuple[Tensor, ...]:
    """Return the inputs by name; what has no name is the files."""
    if not isinstance(inputs, dict) or _has_only(inputs, "b64"):
        inputs = {IMAGE: inputs}
    return tuple(_column(name, values) for name, values in inputs.items())


def _column(name: str, values: Any) -> Tensor:
    if name != IMAGE:
        datatype = "UINT8" if name == PIXELS else "FP32"  # others are refused by their names
        return checked_tensor(name, datatype, _shape_of(values), values=values)
    files = values if isinstance(values, list) else [values]
    if all(isinstance(each, list) and len(each) == 1 for each in files):  # of the shape [N,1]
        files = [each[0] for each in files]
    return _files(files, "image", BY_COLUMN)


def _shape_of(values: Any) -> list[int]:
    """Return the shape by the first element of each level; the others are checked later."""
    shape = []
    while isinstance(values, list):
        shape.append(len(values))
        values = values[0] if values else None
    return shape


def _files(rows: list[Any], what: str, expected: str) -> Tensor:
    for number, each in enumerate(rows):
        if not isinstance(each, dict) or not isinstance(each.get("b64"), str):
            raise BadTensorError(f"{what} {number} is {shown(each)}; send {expected}")
    texts = [each["b64"] for each in rows]
    return checked_tensor(IMAGE, "BYTES", (len(texts),), values=texts, is_base64=True)


def _values(output: OutputTensor) -> list[Any]:
    """Return an output's values for each image."""
    values = output.values()
    if len(output.shape) == 1:
        return values
    width = output.shape[1]
    return [values[start : start + width] for start in range(0, len(values), width)]


def _without_filling(value: Any) -> Any:
    """Return an image's value without labels that only fill a row."""
    return [each for each in value if each != ""] if isinstance(value, list) else value
