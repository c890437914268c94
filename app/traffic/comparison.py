"""Counts what each version did on live requests, and how often two versions agree.

All figures are counts and sums, so figures of several Gateways can be added.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Self

import numpy as np
from pydantic import Field

from app.graph.request import RequestAnswers
from app.messages import Fault
from app.metrics.table import BUCKETS_MS
from app.responses import Classified
from models.accuracy import Z95, wilson_interval
from models.answer_rule import AnswerRule
from models.ensemble import Probabilities

Interval = tuple[float, float]
MAX_DISAGREEMENTS = 20  # The newest of each pair of versions are kept.
OTHER_WORK = ("decode", "preprocess", "combine")  # stages of an image beside its members'


def cpu_ms(answer: Classified, threads_each: int) -> float:
    """Estimate the CPU time of an image's stages, in ms.

    A batch keeps ``threads_each`` cores busy, and its images share that time.
    """
    return sum(
        stage.duration_ms * (threads_each / stage.batch_size if stage.batch_size else 1)
        for stage in answer.timings_ms.stages
        if stage.stage in (*OTHER_WORK, "infer")
    )


@dataclass(slots=True)
class VersionFigures:
    """What one version did: answers to clients, and copies in the shadow lane.

    ``work_ms`` sums, over the ``computed`` images, the time of decoding, of the slowest member and
    of combining, without any wait. ``compute_ms`` sums each member's time for a batch divided by
    the batch's size. Images answered from the cache are not ``computed``.
    """

    answered: int = 0  # images, to clients
    failed: int = 0  # images that the service answered with an error of its own (5xx)
    copies: int = 0  # images that were computed in the shadow lane
    dropped: int = 0  # copies that were not computed: no room, or no time left
    copies_failed: int = 0
    computed: int = 0
    work_ms: float = 0.0
    compute_ms: float = 0.0
    batch_images: float = 0.0  # the sum of the sizes of batches, a mean over the members each
    latencies: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_MS) + 1))

    def note_answers(self, answers: RequestAnswers, latency_ms: float) -> None:
        """Count a client's request that the version answered, in milliseconds."""
        self.latencies[bisect_left(BUCKETS_MS, latency_ms)] += 1
        for answer in answers:
            if isinstance(answer, Fault):
                self.failed += answer.status >= 500
            else:
                self.answered += 1
                self.computed_image(answer)

    def computed_image(self, answer: Classified) -> None:
        """Add the times of an image's stages; an image from the cache has none."""
        stages = answer.timings_ms.stages
        inferred = [s for s in stages if s.stage == "infer" and s.batch_size]
        if not inferred:
            return
        self.computed += 1
        others = sum(s.duration_ms for s in stages if s.stage in OTHER_WORK)
        self.work_ms += others + max(s.duration_ms for s in inferred)
        self.compute_ms += sum(s.duration_ms / (s.batch_size or 1) for s in inferred)
        self.batch_images += sum(s.batch_size or 1 for s in inferred) / len(inferred)

    def add(self, other: Self) -> None:
        """Add another Gateway's."""
        for name in (each.name for each in fields(self) if each.name != "latencies"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        pairs = zip(self.latencies, other.latencies, strict=True)
        self.latencies = [ours + theirs for ours, theirs in pairs]

    def latency_ms(self, share: float) -> float | None:
        """Return a quantile of the latency: the upper bound of the bucket that it is in.

        None if there are no answers.
        """
        total, below = sum(self.latencies), 0
        for bound, number in zip((*BUCKETS_MS, BUCKETS_MS[-1]), self.latencies, strict=True):
            below += number
            if number and below >= share * total:
                return bound
        return None


@dataclass(slots=True)
class Disagreement:
    """A photo to which two versions gave different labels."""

    request_id: str
    file: Annotated[int, Field(description="its place in the request, from 0")]
    labels: Annotated[list[str], Field(description="the reference's label and the version's")]


@dataclass(slots=True)
class Comparison:
    """How the answers of two versions to the same live photos differ."""

    compared: int = 0
    agreed: int = 0
    variation: float = 0.0  # the sum of the distances between probabilities, each 0..1
    variation_squares: float = 0.0
    disagreements: list[Disagreement] = field(default_factory=list)  # the last ones

    def note(self, distance: float, disagreement: Disagreement | None) -> None:
        """Count a photo; ``disagreement`` is None if both versions chose the same."""
        self.compared += 1
        self.variation += distance
        self.variation_squares += distance * distance
        if disagreement is None:
            self.agreed += 1
        else:
            self.disagreements = [*self.disagreements, disagreement][-MAX_DISAGREEMENTS:]

    def add(self, other: Self) -> None:
        """Add another Gateway's."""
        for name in ("compared", "agreed", "variation", "variation_squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.disagreements = [*self.disagreements, *other.disagreements][-MAX_DISAGREEMENTS:]

    @property
    def agreement(self) -> tuple[float, Interval] | None:
        """The share of photos with equal choices and its 95 % interval; None without photos."""
        if not (number := self.compared):
            return None
        return self.agreed / number, wilson_interval(self.agreed, number)

    @property
    def total_variation(self) -> tuple[float, Interval] | None:
        """The mean distance and its 95 % normal interval; None for fewer than two photos."""
        if (number := self.compared) < 2:
            return None
        mean = self.variation / number
        variance = max(0.0, self.variation_squares - number * mean * mean) / (number - 1)
        half = Z95 * math.sqrt(variance / number)
        return mean, (max(0.0, mean - half), min(1.0, mean + half))


@dataclass(slots=True)
class Figures:
    """Figures of versions by name, and of compared pairs by "REFERENCE VERSION"."""

    versions: dict[str, VersionFigures] = field(default_factory=dict)
    pairs: dict[str, Comparison] = field(default_factory=dict)

    def of_version(self, name: str) -> VersionFigures:
        return self.versions.setdefault(name, VersionFigures())

    def of_pair(self, reference: str, version: str) -> Comparison:
        return self.pairs.setdefault(f"{reference} {version}", Comparison())

    def add(self, other: Self) -> None:
        """Add another Gateway's."""
        for name, figures in other.versions.items():
            self.of_version(name).add(figures)
        for pair, comparison in other.pairs.items():
            self.pairs.setdefault(pair, Comparison()).add(comparison)


def distance(first: Probabilities, second: Probabilities, *, is_multi_label: bool) -> float:
    """Return the distance of two rows of probabilities, from 0 (equal) to 1.

    For classes that exclude each other it is the total variation: half the sum of the absolute
    differences. For a multi-label set, whose scores do not sum to 1, it is their mean.
    """
    differences = np.abs(first.astype(np.float64) - second)
    return float(differences.mean() if is_multi_label else differences.sum() / 2)


def choice_of(row: Probabilities, rule: AnswerRule) -> dict[int, str]:
    """Return the labels that a version chooses, by class index, whatever the client asked for.

    They are the likeliest class of a row (C,), or, with a threshold, all classes over it.
    """
    listed = rule.predictions(row, len(row) if rule.is_multi_label else 1)
    return {prediction.index: prediction.label for prediction in listed}


def in_words(choice: Mapping[int, str]) -> str:
    """Return a choice as text: ``cat + dog``, or ``no label``."""
    return " + ".join(sorted(choice.values())) or "no label"
