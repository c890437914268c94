"""Adds the probability of every class to answers, for requests of tensors.

Answers to files list only the likeliest classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from app.graph.members import MemberResults
from app.messages import Combined
from app.responses import Classified
from models.ensemble import Probabilities, average

NAMES = tuple(field.name for field in fields(Classified))


@dataclass(slots=True, kw_only=True)
class ClassifiedWithProbabilities(Classified):
    """The answer for one image, with the probability of every class."""

    probabilities: Probabilities  # (C,) float32


def with_probabilities(
    answers: Sequence[Classified],
    results: Sequence[MemberResults],
    combined: Sequence[Sequence[Combined]],
    weights: Mapping[str, float],
    temperature: float,
) -> list[ClassifiedWithProbabilities]:
    """Return the answers of a request's good images, in order, with all probabilities.

    ``combined`` are the Combiner's answers to ``results``. Their rows are used if they have any;
    otherwise the members' rows are averaged.
    """
    rows: dict[int, Probabilities] = {}  # by the image's place
    for result, images in zip(results, combined, strict=True):
        own = {name: answer.probabilities for name, answer in result.answers.items()}
        kept = [image.row for image in images if image.row is not None]
        mean = kept or average(own, weights, temperature)  # (K, C) float32
        rows |= zip(result.images, mean, strict=True)
    return [with_row(answer, rows[place]) for place, answer in enumerate(answers)]


def with_row(answer: Classified, row: Probabilities) -> ClassifiedWithProbabilities:
    """Return an answer with the probability of every class, float32 (C,)."""
    values = {name: getattr(answer, name) for name in NAMES}
    return ClassifiedWithProbabilities(**values, probabilities=np.ascontiguousarray(row))
