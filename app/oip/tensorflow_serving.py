"""TensorFlow Serving's API, whose REST form KServe's V1 protocol shares, as HTTP and gRPC have it.

A request of ``:predict`` has images by rows or by columns. Rows are ``{"instances": [{"b64":
"..."}]}``, or ``{"instances": [{"image": {"b64": "..."}}]}``; columns are ``{"inputs": {"image":
[{"b64": "..."}]}}``, or ``pixels`` as nested numbers. It is converted to a request of the Open
Inference Protocol, and answered in the form in which it came.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from app.errors import BadTensorError
from app.oip.bodies import InferAnswer, OutputTensor, parsed_json, parsed_object
from app.oip.models import FIRST_VERSION, IMAGE, PIXELS, ModelReady, ServedModel, TensorMetadata
from app.oip.tensors import InferRequest, Tensor, checked_tensor, shown

EXPECTED = '{"instances": [{"b64": "..."}]}, a file in base64 for each image'
BY_COLUMN = '{"inputs": {"image": [{"b64": "..."}]}}, a file in base64 for each image'
SIGNATURE, METHOD = "serving_default", "tensorflow/serving/predict"
TYPES = {"BYTES": "DT_STRING", "UINT8": "DT_UINT8", "FP32": "DT_FLOAT"}
STATUS: dict[str, str] = {"error_code": "OK", "error_message": ""}
AVAILABLE = "AVAILABLE"


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
