"""The service's answers as frozen dataclasses; unknown fields are kept in ``raw`` alone."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem_client.errors import Degraded, TandemError


@dataclass(frozen=True)
class Prediction:
    """One class of an answer; ``index`` is its place in the set's labels, from 0."""

    index: int
    label: str
    probability: float  # 0..1


@dataclass(frozen=True)
class MemberOpinion:
    """What one member says alone: its first choice, and its own likeliest classes.

    Of a multi-label set it may list no label: then ``label`` and ``probability`` are None.
    """

    label: str | None
    probability: float | None
    predictions: Sequence[Prediction]


@dataclass(frozen=True)
class StageTiming:
    """What a stage of the service took, in ms from the request's arrival there."""

    stage: str
    start_ms: float
    duration_ms: float
    member: str | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class Timings:
    """Where the request's time went in the service."""

    total_ms: float
    stages: Sequence[StageTiming]


@dataclass(frozen=True)
class Classification:
    """The answer for one image.

    ``degraded``: fewer members answered than were asked, ``missing_members`` says why each did not.
    ``skipped_members`` were not asked, since the first was sure (a cascade). ``cached``: computed
    for an earlier request. Of a multi-label set ``threshold`` is the least score of a label in
    ``predictions``, which may be empty. ``sure``: the first class is likely enough to be relied on;
    None: the set does not say. ``raw`` is the answer as it came.
    """

    model_set: str
    predictions: Sequence[Prediction]  # the ensemble's, likeliest first
    members: Mapping[str, MemberOpinion]
    agreement: bool  # all members have the same first choice; of a multi-label set, the same labels
    degraded: bool
    request_id: str
    timings: Timings
    skipped_members: Sequence[str] = ()
    missing_members: Mapping[str, str] = field(default_factory=dict)
    cached: bool = False
    threshold: float | None = None
    sure: bool | None = None
    model_version: str = ""  # the set's fingerprint; empty: of a service before 0.2
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def label(self) -> str:
        """The likeliest class; LookupError if a multi-label set lists none."""
        return self._first.label

    @property
    def probability(self) -> float:
        """The likeliest class's probability, 0..1; LookupError as of :attr:`label`."""
        return self._first.probability

    @property
    def labels(self) -> Sequence[str]:
        """The labels of the answer, in its order; of a multi-label set there may be none."""
        return tuple(one.label for one in self.predictions)

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
            told = ", ".join(f"{name} ({why})" for name, why in self.missing_members.items())
            raise Degraded(f"answered without {told or 'all members'}", self)


@dataclass(frozen=True)
class Result:
    """What became of one image of many: an answer or its error.

    ``index`` counts the images from 0; ``path`` is the image's, None if it was given otherwise.
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


def classification_of(told: Mapping[str, Any]) -> Classification:
    """Return the answer that a JSON object is.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is no answer of Tandem's.

    """
    predictions, threshold = _predictions(told["predictions"]), _number(told.get("threshold"))
    if not predictions and threshold is None:
        raise ValueError("an answer without predictions")
    return Classification(
        model_set=str(told["model_set"]),
        predictions=predictions,
        members={name: _opinion(one) for name, one in told["members"].items()},
        agreement=bool(told["agreement"]),
        degraded=bool(told["degraded"]),
        request_id=str(told["request_id"]),
        timings=_timings(told["timings_ms"]),
        skipped_members=tuple(told.get("skipped_members") or ()),
        missing_members=dict(told.get("missing_members") or {}),
        cached=bool(told.get("cached", False)),
        threshold=threshold,
        sure=told.get("sure"),
        model_version=str(told.get("model_version", "")),
        raw=told,
    )


def _predictions(told: Sequence[Mapping[str, Any]]) -> tuple[Prediction, ...]:
    return tuple(
        Prediction(int(one["index"]), str(one["label"]), float(one["probability"])) for one in told
    )


def _opinion(told: Mapping[str, Any]) -> MemberOpinion:
    predictions = _predictions(told["predictions"])
    if not predictions:  # of a multi-label set
        return MemberOpinion(None, None, ())
    return MemberOpinion(str(told["label"]), float(told["probability"]), predictions)


def _number(told: Any) -> float | None:
    return None if told is None else float(told)


def _timings(told: Mapping[str, Any]) -> Timings:
    stages = tuple(
        StageTiming(
            str(one["stage"]),
            float(one["start_ms"]),
            float(one["duration_ms"]),
            one.get("member"),
            one.get("batch_size"),
        )
        for one in told["stages"]
    )
    return Timings(float(told["total"]), stages)
