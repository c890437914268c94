"""The answer to an inference request: its output tensors, and its form over HTTP.

Over HTTP it is JSON, followed by the binary tensors. Outputs are probabilities, labels, and
Triton's classification strings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from app.errors import BadRegionError
from app.oip.models import LABEL, OUTPUTS, PROBABILITIES, ServedModel
from app.oip.regions import Regions
from app.oip.request import REGION, REGION_OFFSET, REGION_SIZE, InferRequest, RequestedOutput
from app.oip.tensors import RegionSlice, packed_elements
from app.responses import Classified
from models.answer_rule import AnswerRule
from models.ensemble import Prediction, top_k

PROBABILITY_BYTES = 4  # FP32
Images = Sequence[Classified]


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
    asked = request.outputs or [RequestedOutput(name, request.wants_binary) for name in OUTPUTS]
    parameters: dict[str, bool | str] = {}
    if missing := {
        name: why for image in images for name, why in (image.missing_members or {}).items()
    }:
        reasons = ", ".join(f"{name}: {why}" for name, why in missing.items())
        parameters = {"degraded": True, "missing_members": reasons}
    if model.member is None and all(image.sure is not None for image in images):
        parameters["sure"] = all(image.sure for image in images)
    if all(image.cached for image in images):
        parameters["cached"] = True
    outputs = tuple(_output(output, request, model, images) for output in asked)
    version = images[0].model_version if images else model.version
    return InferAnswer(model.name, version, request.id, outputs, parameters)


def _output(
    asked: RequestedOutput, request: InferRequest, model: ServedModel, images: Images
) -> OutputTensor:
    contents: npt.NDArray[np.float32] | list[bytes]
    shape: tuple[int, ...]
    if asked.name == LABEL:
        shape, contents = _labels(request, model, images)
    elif asked.num_classes:
        num_classes = min(asked.num_classes, len(model.labels))
        shape = (len(images), num_classes)
        best = _best(images, model, num_classes)
        contents = [f"{p.probability:f}:{p.index}:{p.label}".encode() for p in best]
    else:
        contents = np.stack([image.probabilities for image in images])  # (N, C) float32
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


def _best(images: Images, model: ServedModel, k: int) -> list[Prediction]:
    """Return the likeliest ``k`` classes of each image, row by row."""
    return [p for image in images for p in top_k(image.probabilities, model.labels, k)]


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
