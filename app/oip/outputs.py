"""The output tensors of an inference request: probabilities, labels, classification strings."""

from collections.abc import Sequence

import numpy as np

from app.errors import BadRegionError
from app.graph.probabilities import ClassifiedWithProbabilities
from app.oip.answer import InferAnswer, OutputTensor
from app.oip.models import LABEL, OUTPUTS, PROBABILITIES, ServedModel
from app.oip.regions import Regions
from app.oip.request import InferRequest, RequestedOutput
from models.answer_rule import AnswerRule
from models.ensemble import Prediction, top_k

PROBABILITY_BYTES = 4  # FP32


def check_outputs_fit(
    request: InferRequest, model: ServedModel, num_images: int, regions: Regions | None
) -> None:
    """Check the regions that outputs go to before anything is computed for them.

    Raises:
        UnknownRegionError, BadRegionError: one is not as it was registered, or too small.

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


def answer_of(
    request: InferRequest, model: ServedModel, images: Sequence[ClassifiedWithProbabilities]
) -> InferAnswer:
    """Return the outputs that a request asks for, an image after the other."""
    asked = request.outputs or [RequestedOutput(name, request.wants_binary) for name in OUTPUTS]
    parameters: dict[str, bool | str] = {}
    if missing := {
        name: why for image in images for name, why in (image.missing_members or {}).items()
    }:
        told = ", ".join(f"{name}: {why}" for name, why in missing.items())
        parameters = {"degraded": True, "missing_members": told}
    if all(image.cached for image in images):
        parameters["cached"] = True
    outputs = tuple(_output(output, request, model, images) for output in asked)
    return InferAnswer(model.name, request.id, outputs, parameters)


def _output(
    asked: RequestedOutput,
    request: InferRequest,
    model: ServedModel,
    images: Sequence[ClassifiedWithProbabilities],
) -> OutputTensor:
    if asked.name == LABEL:
        of_labels = _labels if model.threshold is None else _labels_of_several
        shape, names = of_labels(request, model, images)
        return OutputTensor(LABEL, "BYTES", shape, names, asked.is_binary, asked.region)
    if asked.num_classes:
        num_classes = min(asked.num_classes, len(model.labels))
        best = _best(images, model, num_classes)
        texts = [_classification(each) for row in best for each in row]
        shape = (len(images), num_classes)
        return OutputTensor(asked.name, "BYTES", shape, texts, asked.is_binary, asked.region)
    rows = np.stack([image.probabilities for image in images])  # (N, C) float32
    return OutputTensor(asked.name, "FP32", rows.shape, rows, asked.is_binary, asked.region)


def _labels(
    request: InferRequest, model: ServedModel, images: Sequence[ClassifiedWithProbabilities]
) -> tuple[tuple[int, ...], list[bytes]]:
    """Return the shape, (N,) or (N, top_k), and the labels, row by row."""
    num_labels = request.top_k
    shape = (len(images),) if num_labels is None else (len(images), num_labels)
    best = _best(images, model, num_labels or 1)
    return shape, [each.label.encode() for row in best for each in row]


def _labels_of_several(
    request: InferRequest, model: ServedModel, images: Sequence[ClassifiedWithProbabilities]
) -> tuple[tuple[int, ...], list[bytes]]:
    """Return the shape (N, K) and the labels of a multi-label set, row by row.

    K: of the image that has most, at least one; the others' rows end in empty labels.
    """
    rule = AnswerRule(model.labels, model.threshold).asked(request.threshold)
    most = request.top_k or len(model.labels)
    found = [[p.label for p in rule.predictions(i.probabilities, most)] for i in images]
    width = max(1, *map(len, found))
    return (len(images), width), [
        label.encode() for row in found for label in (*row, *[""] * (width - len(row)))
    ]


def _best(
    images: Sequence[ClassifiedWithProbabilities], model: ServedModel, k: int
) -> list[list[Prediction]]:
    return [top_k(image.probabilities, model.labels, k) for image in images]


def _classification(prediction: Prediction) -> bytes:
    """Return a class as Triton's classification extension writes it."""
    return f"{prediction.probability:f}:{prediction.index}:{prediction.label}".encode()
