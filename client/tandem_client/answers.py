"""The service's answers as frozen dataclasses; unknown fields are kept only in ``raw``."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem_client.errors import Degraded, TandemError


@dataclass(frozen=True)
class Prediction:
    """A class of an answer; ``index`` is its place in the set's labels, from 0."""

    index: int
    label: str
    probability: float  # 0..1


@dataclass(frozen=True)
class MemberOpinion:
    """A member's own answer: its first choice, and its likeliest classes.

    In a multi-label set it may list no label; then ``label`` and ``probability`` are None.
    """

    label: str | None
    probability: float | None
    predictions: Sequence[Prediction]


@dataclass(frozen=True)
class StageTiming:
    """The duration of a stage of the service, in ms from the request's arrival there."""

    stage: str
    start_ms: float
    duration_ms: float
    member: str | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class Timings:
    """The durations of the request's stages in the service."""

    total_ms: float
    stages: Sequence[StageTiming]


@dataclass(frozen=True)
class Classification:
    """The answer for an image.

    Attributes:
        degraded: whether fewer members answered than were asked.
        missing_members: why each of the others did not answer.
        skipped_members: members not asked, since the first was sure (a cascade).
        cached: whether it was computed for an earlier request.
        threshold: for a multi-label set, the lowest score of a label in ``predictions``, which may
            be empty.
        sure: whether the first class is likely enough to be relied on; None if the set has no
            bound.
        raw: the answer as received.

    """

    model_set: str
    predictions: Sequence[Prediction]  # the ensemble's, likeliest first
    members: Mapping[str, MemberOpinion]
    agreement: bool  # equal first choices of all members; for a multi-label set, equal labels
    degraded: bool
    request_id: str
    timings: Timings
    skipped_members: Sequence[str] = ()
    missing_members: Mapping[str, str] = field(default_factory=dict)
    cached: bool = False
    threshold: float | None = None
    sure: bool | None = None
    model_version: str = ""  # the set's fingerprint; empty for a service before 0.2
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def label(self) -> str:
        """The likeliest class; LookupError if a multi-label set lists none."""
        return self._first.label

    @property
    def probability(self) -> float:
        """The likeliest class's probability, 0..1; LookupError as for :attr:`label`."""
        return self._first.probability

    @property
    def labels(self) -> Sequence[str]:
        """The labels of the answer, in its order; none are possible for a multi-label set."""
        return tuple(prediction.label for prediction in self.predictions)

    @property
    def _first(self) -> Prediction:
        if not self.predictions:
            raise LookupError(
                f"no label has a score of {self.threshold:g} or more: a multi-label set may list "
                "none; use labels"
            )
        return self.predictions[0]

    def check_whole(self) -> None:
        """Raise :class:`Degraded` if a member is missing."""
        if self.degraded:
            missing = ", ".join(f"{name} ({why})" for name, why in self.missing_members.items())
            raise Degraded(f"answered without {missing or 'all members'}", self)


@dataclass(frozen=True)
class Result:
    """The result for an image among several: an answer or an error.

    ``index`` counts the images from 0. ``path`` is the image's path, or None without one.
    """

    index: int
    path: str | os.PathLike[str] | None = None
    answer: Classification | None = None
    error: TandemError | None = None

    def get(self) -> Classification:
        """Return the answer, or raise the error."""
        if self.answer is None:
            raise self.error or TandemError("there is neither an answer nor an error")
        return self.answer


def classification_of(fields: Mapping[str, Any]) -> Classification:
    """Parse the JSON object of an answer.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the object is not an answer of Tandem.

    """
    predictions, threshold = _predictions(fields["predictions"]), _number(fields.get("threshold"))
    if not predictions and threshold is None:
        raise ValueError("an answer without predictions")
    return Classification(
        model_set=str(fields["model_set"]),
        predictions=predictions,
        members={name: _opinion(opinion) for name, opinion in fields["members"].items()},
        agreement=bool(fields["agreement"]),
        degraded=bool(fields["degraded"]),
        request_id=str(fields["request_id"]),
        timings=_timings(fields["timings_ms"]),
        skipped_members=tuple(fields.get("skipped_members") or ()),
        missing_members=dict(fields.get("missing_members") or {}),
        cached=bool(fields.get("cached", False)),
        threshold=threshold,
        sure=fields.get("sure"),
        model_version=str(fields.get("model_version", "")),
        raw=fields,
    )


def _predictions(rows: Sequence[Mapping[str, Any]]) -> tuple[Prediction, ...]:
    return tuple(
        Prediction(int(row["index"]), str(row["label"]), float(row["probability"])) for row in rows
    )


def _opinion(fields: Mapping[str, Any]) -> MemberOpinion:
    predictions = _predictions(fields["predictions"])
    if not predictions:  # possible for a multi-label set
        return MemberOpinion(None, None, ())
    return MemberOpinion(str(fields["label"]), float(fields["probability"]), predictions)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _timings(fields: Mapping[str, Any]) -> Timings:
    stages = tuple(
        StageTiming(
            str(stage["stage"]),
            float(stage["start_ms"]),
            float(stage["duration_ms"]),
            stage.get("member"),
            stage.get("batch_size"),
        )
        for stage in fields["stages"]
    )
    return Timings(float(fields["total"]), stages)
