"""The service's answers as frozen dataclasses, and its errors.

Unknown fields of an answer are kept only in ``raw``. Errors have the service's message, code and
request id; every constructor hands its arguments to ``Exception``, so that they can be pickled.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timezone
from email.utils import parsedate_to_datetime
from typing import Any, Literal

Reason = Literal["overloaded", "not_ready", "refused", "reset"]


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
        plan: "full" if every member was asked; "fast" by the set's fast plan.
        asked: the members that the fast plan asked, in its order.
        reason: why the service chose the fast plan itself: "load".
        skipped_members: members not asked, since those before were likely enough (fast plan).
        cached: whether it was computed for an earlier request.
        threshold: for a multi-label set, the lowest score of a label in ``predictions``, which may
            be empty.
        sure: whether the first class is likely enough to be relied on; None without a bound.
        no_sure: why there is no bound, in a set that has one in general.
        answer_set: the classes that hold the right one in 95 % of cases, if asked for.
        embedding: the pooled features of the member asked for, float32; () without.
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
    no_sure: str | None = None
    plan: str = "full"
    asked: Sequence[str] = ()
    reason: str | None = None
    answer_set: Sequence[Prediction] = ()
    embedding: Sequence[float] = field(default=(), repr=False)
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
    """The result for an image among several, or for a region: an answer or an error.

    ``index`` counts them from 0. ``path`` is the image's path, or None without one.
    """

    index: int
    path: str | os.PathLike[str] | None = None
    answer: Classification | None = None
    error: "TandemError | None" = None

    @classmethod
    def of(
        cls,
        index: int,
        path: str | os.PathLike[str] | None,
        outcome: "Outcome",
        *,
        allow_degraded: bool,
    ) -> "Result":
        """Return the result for an image's outcome.

        An error loses its traceback, whose frames would keep the image in memory, for thousands of
        images.
        """
        try:
            return cls(index, path, checked(outcome, allow_degraded=allow_degraded))
        except TandemError as error:
            error.__cause__ = error.__context__ = None
            return cls(index, path, error=error.with_traceback(None))

    def get(self) -> Classification:
        """Return the answer, or raise the error."""
        if self.answer is None:
            raise self.error or TandemError("there is neither an answer nor an error")
        return self.answer


@dataclass(frozen=True)
class Taught:
    """A photograph that the service keeps with its label; ``before`` is the label it had."""

    id: str  # of its bytes, for erase_samples
    label: str
    model_set: str
    before: str | None = None


@dataclass(frozen=True)
class TaughtFigures:
    """What the answering node keeps of taught photographs, and may keep."""

    photographs: int
    corrections: int  # labels that feedback gave to samples
    labels: Mapping[str, int]  # photographs of each
    bytes: int
    max_photographs: int
    max_bytes: int


@dataclass(frozen=True)
class Feedback:
    """The right label of an answered image, and whether the answer had it."""

    request_id: str
    label: str
    answered: Sequence[str]  # the first label; of a multi-label set, all that were listed
    right: bool
    model_set: str
    model_version: str


@dataclass(frozen=True)
class Erased:
    """How many samples and photographs were erased, and how many Gateways have looked for them."""

    id: str
    erased: int
    num_gateways: int
    num_current: int  # the others follow


class TandemError(Exception):
    """Root of the tree.

    Attributes:
        code: stable: the service's, or the client's own (``unreachable``, ``bad_answer``,
            ``deadline``, ``unreadable``, ``bad_array``, ``degraded``).
        request_id: None without an answer, or for the error of a file among several.
        status: the HTTP status; None in the same cases. Over gRPC it is that of the gRPC status:
            400 also for 413, 415 and 422, which gRPC does not tell apart.
        retry_after_s: when the service suggests to try again, in s.
    """

    reason: Reason | None = None  # why it may be retried; None: never

    def __init__(
        self,
        message: str,
        code: str = "internal",
        request_id: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code, request_id, status, retry_after_s)
        self.message, self.code = message, code
        self.request_id, self.status = request_id, status
        self.retry_after_s = retry_after_s  # the service's advice

    def __str__(self) -> str:
        asked = f", request {self.request_id}" if self.request_id else ""
        return f"{self.message} ({self.code}{asked})"


class BadImage(TandemError):
    """The image cannot be used: not an image, damaged, unsupported, too large, or unreadable."""


class BadRequest(TandemError):
    """A parameter or the whole request is invalid: ``bad_parameter``, ``too_many_files``."""


class Unauthorized(TandemError):
    """The service requires a key, and the request had none, a wrong one, or one without right."""


class Overloaded(TandemError):
    """All places are taken, or the key's rate is (429), even after the retries in time."""

    reason = "overloaded"


class NotReady(TandemError):
    """A member of the ensemble does not answer yet, or no longer (503)."""

    reason = "not_ready"


class DeadlineExceeded(TandemError):
    """There was no answer in time, by the service (504) or the client."""


class ServiceError(TandemError):
    """The service failed (500); its log has the request id."""


class BrokenOff(ServiceError):
    """The part of the service that had the request ended before it answered (502)."""

    reason = "reset"


class BadAnswer(TandemError):
    """The answer is not Tandem's: perhaps another service has this address."""


class Unreachable(TandemError):
    """No answer: refused, broken off, an unknown address, or an untrusted certificate."""

    def __init__(self, message: str, reason: Reason | None = None) -> None:
        super().__init__(message, "unreachable")
        self.args = (message, reason)
        self.reason = reason


class Degraded(TandemError):
    """Fewer members answered than were asked, and the client does not accept their answer.

    ``answer`` is the answer of the others.
    """

    def __init__(self, message: str, answer: "Classification") -> None:
        super().__init__(message, "degraded", answer.request_id, 200)
        self.args = (message, answer)
        self.answer = answer


_KINDS: Mapping[type[TandemError], tuple[str, ...]] = {
    BadImage: (
        *("not_an_image", "corrupt_image", "unsupported_format"),
        *("too_many_pixels", "too_many_bytes"),
    ),
    BadRequest: ("bad_parameter", "too_many_files", "outside_picture"),
    Unauthorized: ("unauthorized", "forbidden"),
    Overloaded: ("overloaded", "rate_limited"),
    NotReady: ("not_ready", "other_set", "unhealthy"),
    BrokenOff: ("broken_off",),
    DeadlineExceeded: ("slow_body", "deadline"),
}
_BY_CODE = {code: kind for kind, codes in _KINDS.items() for code in codes}
# HTTP statuses that alone determine the error, whichever server sent them.
BY_STATUS: Mapping[int, type[TandemError]] = {
    401: Unauthorized,
    403: Unauthorized,
    408: DeadlineExceeded,
    429: Overloaded,
    503: NotReady,
    504: DeadlineExceeded,
}
Outcome = Classification | TandemError  # of an image that was sent


def checked(outcome: Outcome, *, allow_degraded: bool) -> Classification:
    """Return an image's answer, or raise its error."""
    if isinstance(outcome, TandemError):
        raise outcome
    if not allow_degraded:
        outcome.check_whole()
    return outcome


def outcome_of(row: Mapping[str, Any]) -> Outcome:
    """Parse an image's answer, or its error."""
    return error_of(row["error"]) if "error" in row else classification_of(row)


def classification_of(fields: Mapping[str, Any]) -> Classification:
    """Parse the JSON object of an answer.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the object is not an answer of Tandem.
    """
    predictions, threshold = _predictions(fields["predictions"]), fields.get("threshold")
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
        threshold=None if threshold is None else float(threshold),
        sure=fields.get("sure"),
        no_sure=fields.get("no_sure"),
        plan=str(fields.get("plan") or "full"),
        asked=tuple(fields.get("asked") or ()),
        reason=fields.get("reason"),
        answer_set=_predictions(fields.get("answer_set") or ()),
        embedding=tuple(map(float, fields.get("embedding") or ())),
        model_version=str(fields.get("model_version", "")),
        raw=fields,
    )


def _predictions(rows: Sequence[Mapping[str, Any]]) -> tuple[Prediction, ...]:
    facts = ((row["index"], row["label"], row["probability"]) for row in rows)
    return tuple(Prediction(int(i), str(label), float(p)) for i, label, p in facts)


def _opinion(fields: Mapping[str, Any]) -> MemberOpinion:
    predictions = _predictions(fields["predictions"])
    if not predictions:  # possible for a multi-label set
        return MemberOpinion(None, None, ())
    return MemberOpinion(str(fields["label"]), float(fields["probability"]), predictions)


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


def error_of(
    fields: Mapping[str, Any], status: int | None = None, retry_after_s: float | None = None
) -> TandemError:
    """Return the error for the service's ``{"code", "message", "request_id"}``.

    A code that this client does not know is mapped by the HTTP status, if there is one.
    """
    code, message, request_id = (fields.get(name) for name in ("code", "message", "request_id"))
    of_status = BadRequest if 400 <= (status or 500) < 500 else ServiceError
    kind = _BY_CODE.get(str(code)) or BY_STATUS.get(status or 500, of_status)
    return kind(str(message), str(code), request_id and str(request_id), status, retry_after_s)


def retry_after_s(value: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Parse a Retry-After header (RFC 9110, section 10.2.3): seconds, or a date.

    None if it is absent or malformed.
    """
    text = (value or "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    if date.tzinfo is None:  # "-0000": UTC without a known zone
        date = date.replace(tzinfo=timezone.utc)
    return max(0.0, date.timestamp() - now())
