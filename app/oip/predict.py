"""KServe's V1 protocol, which is TensorFlow Serving's: images in base64, rows of outputs.

A request is ``{"instances": [{"b64": "..."}]}``, or ``{"instances": [{"image": {"b64": "..."}}]}``.
It is converted to an inference request of the Open Inference Protocol.
"""

from typing import Any

import orjson

from app.errors import BadTensorError
from app.oip.answer import InferAnswer, OutputTensor
from app.oip.json_body import parsed_json, parsed_object
from app.oip.models import IMAGE
from app.oip.request import InferRequest
from app.oip.tensors import checked_tensor, shown

EXPECTED = '{"instances": [{"b64": "..."}]}, a file in base64 for each image'


def parse_instances(body: bytes, _: str | None = None) -> InferRequest:
    """Return the request in a body; raise as :func:`~app.oip.json_body.parse_request` does."""
    fields = parsed_object(parsed_json(body, f"send {EXPECTED}"), "the request")
    instances = fields.get("instances")
    if not isinstance(instances, list):
        raise BadTensorError(f"instances is {shown(instances)}; send {EXPECTED}")
    files = [_file(number, each) for number, each in enumerate(instances)]
    tensor = checked_tensor(IMAGE, "BYTES", (len(files),), values=files, is_base64=True)
    parameters = parsed_object(fields.get("parameters", {}), "parameters")
    return InferRequest((tensor,), parameters=parameters)


def _file(number: int, instance: Any) -> str:
    """Return an image's base64 text, with or without the input's name around it."""
    if isinstance(instance, dict) and instance.keys() == {IMAGE}:
        instance = instance[IMAGE]
    if not isinstance(instance, dict) or not isinstance(instance.get("b64"), str):
        raise BadTensorError(f"instance {number} is {shown(instance)}; send {EXPECTED}")
    file: str = instance["b64"]
    return file


def rendered_predictions(answer: InferAnswer) -> tuple[bytes, None]:
    """Return the body and None, since none of it is binary."""
    columns = {output.name: _rows(output) for output in answer.outputs}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    of_all = {"parameters": answer.parameters} if answer.parameters else {}
    return orjson.dumps({"predictions": rows} | of_all), None


def _rows(output: OutputTensor) -> list[Any]:
    """Return an output's values for each image, without labels that only fill a row."""
    values = output.values()
    if len(output.shape) == 1:
        return values
    width = output.shape[1]
    rows = [values[start : start + width] for start in range(0, len(values), width)]
    return [[value for value in row if value != ""] for row in rows]
