"""The messages that stages of the graph send each other, and the answers of the HTTP interface.

The answers are plain dataclasses: FastAPI reads their fields for the schema in /docs. A request
makes about twenty of these objects. They are not validated, since all values were made here.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from models.ensemble import PLAIN, AnswerRule, PlanName, Prediction, Probabilities, Trust, reaches
from models.errors import TandemError
from models.network import Features, Pixels

logger = logging.getLogger("ray.serve")
OF_OWN_COMBINE = Trust(no_bound="the service's own combine made the answer, not an average")


@dataclass(frozen=True, slots=True)
class Fault:
    """An image's error as a value: one bad file must not fail its neighbours."""

    status: int
    code: str
    message: str

    @classmethod
    def of(cls, error: TandemError) -> "Fault":
        return cls(error.status, error.code, error.message)


# The client's answer if the fault is ours; the log has the exception.
UNEXPECTED = Fault(
    500,
    TandemError.code,
    "an error inside the service; its log has the details under this request id",
)


def logged_fault(error: Exception, request_id: str) -> Fault:
    """Return the fault that a client gets for an error; errors of the service are logged."""
    extra = {"request_id": request_id}
    if not isinstance(error, TandemError):
        logger.error("request %s failed", request_id, exc_info=error, extra=extra)
        return UNEXPECTED
    if error.status == UNEXPECTED.status:
        logger.error("request %s: %s", request_id, error.message, extra=extra)
    return Fault.of(error)


class Decoded(NamedTuple):
    """The Decoder's answer: the good images stacked, in order, and the bad ones' faults."""

    # uint8 BGR, (K, H, W, 3); (K, B) where members take different inputs: models.image
    images: Pixels
    faults: dict[int, Fault]  # by position in the request
    decode_ms: tuple[float, ...]  # per good image
    model_set_fingerprint: str  # equal in all stages, except during a rolling update


class MemberAnswer(NamedTuple):
    """A Classifier's answer for K images."""

    probabilities: Probabilities  # (K, C) float32
    queue_ms: tuple[float, ...]  # per image
    infer_ms: tuple[float, ...]  # of the batch that the image was in
    batch_size: tuple[int, ...]
    model_set_fingerprint: str
    features: Features | None = None  # (K, F) float32, if they were asked for

    def rows(self, positions: Sequence[int]) -> "MemberAnswer":
        """Return the answer for some of the images."""
        return MemberAnswer(
            self.probabilities[positions],
            tuple(self.queue_ms[i] for i in positions),
            tuple(self.infer_ms[i] for i in positions),
            tuple(self.batch_size[i] for i in positions),
            self.model_set_fingerprint,
            None if self.features is None else self.features[positions],
        )


class Combined(NamedTuple):
    """The Combiner's answer for one image; every list is likeliest first."""

    predictions: list[Prediction]
    members: dict[str, list[Prediction]]
    agreement: bool  # all members that answered have the same top-1, or the same labels
    entropy: float  # of the average's row, 0 (sure) to 1; models/ensemble.py
    model_set_fingerprint: str
    row: Probabilities | None = None  # (C,), only of the operator's own combine
    threshold: float | None = None  # of the scores that are listed, of a multi-label set
    sure: bool | None = None  # by the bound of those who answered; None: they have none
    no_sure: str | None = None  # why not, in a set that has a bound
    answer_set: list[Prediction] | None = None  # if it was asked for

    @classmethod
    def of(
        cls,
        mean: Probabilities,
        members: Mapping[str, Probabilities],
        rule: AnswerRule,
        k: int,
        fingerprint: str,
        trust: Trust = PLAIN,
        *,
        is_row_kept: bool = False,
        has_set: bool = False,
    ) -> "Combined":
        """Return the answer of up to ``k`` classes from the average and each member's row, (C,).

        ``trust`` is that of ``mean``. ``is_row_kept``: the answer carries ``mean``, which is the
        operator's own and cannot be computed again from the members' rows. ``has_set``: the answer
        set was asked for.
        """
        own = {name: rule.predictions(row, k) for name, row in members.items()}
        is_agreed = rule.agree(members.values())
        row = mean if is_row_kept else None
        predictions, unsure = rule.predictions(mean, k), rule.entropy(mean)
        if is_row_kept:  # the bounds were measured on averages
            trust = PLAIN if trust.sure_from is None else OF_OWN_COMBINE
        sure, bound = reaches(mean, trust.sure_from), trust.set_from
        answer_set = rule.answer_set(mean, bound) if has_set and bound is not None else None
        facts = (row, rule.threshold, sure, trust.no_bound, answer_set)
        return cls(predictions, own, is_agreed, unsure, fingerprint, *facts)


@dataclass(slots=True, kw_only=True)
class MemberOpinion:
    """The answer of one member: its first choice, and its own list.

    ``label`` and ``probability`` are left out where a multi-label set's member lists no label.
    """

    label: str | SkipJsonSchema[None] = None
    probability: float | SkipJsonSchema[None] = None
    predictions: list[Prediction]


@dataclass(slots=True)
class StageTiming:
    """One bar of the timeline; times in ms from the request's arrival at the Gateway.

    ``read`` receives the body. ``cache`` looks into the response cache, or waits for another
    request's computation. ``decode`` makes pixels; ``preprocess`` is the operator's own function on
    them. ``queue`` and ``infer`` are a member's. ``combine`` averages, or calls the operator's own
    function. The time between two bars is transport.
    """

    stage: str
    start_ms: float
    duration_ms: float
    # Left out of the answer rather than null, which OpenAPI 3.0 has no type for.
    member: str | SkipJsonSchema[None] = None
    batch_size: int | SkipJsonSchema[None] = None


@dataclass(slots=True)
class Timings:
    """The duration of a request and of each of its stages, in ms."""

    total: float
    stages: list[StageTiming]


@dataclass(slots=True, kw_only=True)
class Classified:
    """The answer for one image."""

    model_set: str
    model_version: Annotated[str, Field(description="the set's fingerprint: who answered")]
    predictions: Annotated[
        list[Prediction],
        Field(
            description="likeliest first; in a multi-label set all labels with a score of at least "
            "the threshold, perhaps none"
        ),
    ]
    members: dict[str, MemberOpinion]
    agreement: Annotated[
        bool,
        Field(
            description="all members have the same first choice; of a multi-label set, the same "
            "labels"
        ),
    ]
    degraded: Annotated[bool, Field(description="fewer members answered than were asked")]
    # Left out unless the set says when an answer is sure, for those who answered.
    sure: Annotated[
        bool | SkipJsonSchema[None],
        Field(
            description="true if the top probability reaches the bound of those who answered, from "
            "which on the set showed enough right answers"
        ),
    ] = None
    # Left out unless ``sure`` is, in a set that has a bound.
    no_sure: Annotated[
        str | SkipJsonSchema[None], Field(description="why this answer has no bound")
    ] = None
    # Left out unless the request asked for it, and the set has one.
    answer_set: Annotated[
        list[Prediction] | SkipJsonSchema[None],
        Field(description="classes that hold the right one in 95 % of cases, likeliest first"),
    ] = None
    # (F,) float32; left out unless the request asked for it.
    embedding: Annotated[
        list[float] | SkipJsonSchema[None],
        Field(description="the pooled features of the member that embedding names, float32"),
    ] = None
    plan: Annotated[
        PlanName,
        Field(description="full: every member was asked; fast: by the set's fast plan, in steps"),
    ] = "full"
    # Left out unless the plan is fast.
    asked: Annotated[
        list[str] | SkipJsonSchema[None],
        Field(description="the members that the fast plan asked, in its order"),
    ] = None
    # Left out unless the service chose the plan itself.
    reason: Annotated[
        str | SkipJsonSchema[None],
        Field(description="why the plan is fast: load (setting when_full)"),
    ] = None
    # Left out unless there are some.
    skipped_members: Annotated[
        list[str] | SkipJsonSchema[None],
        Field(description="not asked: by the fast plan, those before were likely enough"),
    ] = None
    missing_members: Annotated[
        dict[str, str] | SkipJsonSchema[None],
        Field(description="did not answer, and why: late, not_asked (it failed lately), or a code"),
    ] = None
    # Left out unless the set is multi-label.
    threshold: Annotated[
        float | SkipJsonSchema[None],
        Field(description="of a multi-label set: labels with this score or more are listed"),
    ] = None
    # Left out unless it is true.
    cached: Annotated[
        bool | SkipJsonSchema[None],
        Field(description="true if another request computed it (setting cache)"),
    ] = None
    request_id: str
    timings_ms: Timings
    # (C,) float32, only for requests of tensors; renderings leave it out.
    probabilities: SkipJsonSchema[Any] = None


OTHER_WORK = ("decode", "preprocess", "combine")  # stages of an image beside its members'


def cpu_ms(answer: Classified, threads_each: int, num_images: int = 1) -> float:
    """Estimate the CPU time of an image's stages, in ms.

    A batch keeps ``threads_each`` cores busy, and its images share that time. So do the
    ``num_images`` of a request share what it does once for all: preprocess and combine.
    """

    def share(stage: StageTiming) -> float:
        if stage.batch_size:
            return threads_each / stage.batch_size
        return 1 if stage.stage == "decode" else 1 / num_images

    stages = (s for s in answer.timings_ms.stages if s.stage in (*OTHER_WORK, "infer"))
    return sum(stage.duration_ms * share(stage) for stage in stages)


@dataclass(slots=True)
class ErrorDetail:
    """What was wrong, the limit, and what to do next."""

    code: str
    message: str
    request_id: str


@dataclass(slots=True)
class ErrorAnswer:
    """Every status from 400 up has this body."""

    error: ErrorDetail


@dataclass(slots=True)
class Results:
    """The answer for a multipart request, or for regions: one entry per file or region."""

    results: list[Classified | ErrorAnswer]
    request_id: str


@dataclass(slots=True)
class Ready:
    """The answer of /readyz, /healthz and /v2/health/ready."""

    ready: bool


def as_json(answer: Classified | Results | ErrorAnswer) -> bytes:
    """Return an answer as UTF-8 JSON; fields of an image's answer that are None are left out."""
    if isinstance(answer, Classified):
        return orjson.dumps(answer_values(answer), option=orjson.OPT_SERIALIZE_NUMPY)
    if isinstance(answer, Results):
        rows = [
            answer_values(row) if isinstance(row, Classified) else row for row in answer.results
        ]
        values = {"results": rows, "request_id": answer.request_id}
        return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    return orjson.dumps(answer)


def as_values(answer: Classified) -> dict[str, Any]:
    """Return an answer as dicts, lists and plain values; fields that are None are left out."""
    values: dict[str, Any] = orjson.loads(as_json(answer))
    return values


def answer_values(answer: Classified) -> dict[str, Any]:
    """Return the rendered fields that are not None; orjson renders the dataclasses within."""
    values = _values(answer)
    values.pop("probabilities", None)
    if answer.threshold is not None:  # a member may list no label
        values["members"] = {name: _values(member) for name, member in answer.members.items()}
    values["timings_ms"] = {
        "total": answer.timings_ms.total,
        "stages": list(map(_stage_values, answer.timings_ms.stages)),
    }
    return values


def _stage_values(stage: StageTiming) -> dict[str, Any]:
    """Return the same as :func:`_values`, faster: an image has seven stages."""
    values: dict[str, Any] = {
        "stage": stage.stage,
        "start_ms": stage.start_ms,
        "duration_ms": stage.duration_ms,
    }
    if stage.member is not None:
        values["member"] = stage.member
    if stage.batch_size is not None:
        values["batch_size"] = stage.batch_size
    return values


def _values(part: Classified | MemberOpinion) -> dict[str, Any]:
    names = part.__slots__
    return {name: value for name in names if (value := getattr(part, name)) is not None}


def error_answer(fault: Fault, request_id: str) -> ErrorAnswer:
    """Return the body of an error response."""
    return ErrorAnswer(ErrorDetail(fault.code, fault.message, request_id))


def classified(
    combined: Combined,
    model_set: str,
    model_version: str,
    skipped: Sequence[str],
    missing: Mapping[str, str],
    request_id: str,
    timings: Timings,
    *,
    is_cached: bool = False,
    probabilities: Probabilities | None = None,
    embedding: Features | None = None,
    plan: PlanName = "full",
    asked: Sequence[str] = (),
    reason: str | None = None,
) -> Classified:
    """Return an image's answer for clients, from the Combiner's.

    ``skipped`` members were not asked. ``missing`` members should have answered; the value is the
    code of the reason. ``asked`` are the members of a fast plan.
    """
    members = {name: _opinion(predictions) for name, predictions in combined.members.items()}
    return Classified(
        model_set=model_set,
        model_version=model_version,
        predictions=combined.predictions,
        members=members,
        agreement=combined.agreement,
        degraded=bool(missing),
        sure=combined.sure,
        no_sure=combined.no_sure,
        answer_set=combined.answer_set,
        embedding=embedding,  # type: ignore[arg-type]  # orjson renders it as a list
        plan=plan,
        asked=list(asked) or None,
        reason=reason,
        skipped_members=list(skipped) or None,
        missing_members=dict(missing) or None,
        threshold=combined.threshold,
        cached=is_cached or None,
        request_id=request_id,
        timings_ms=timings,
        probabilities=probabilities,
    )


def _opinion(predictions: list[Prediction]) -> MemberOpinion:
    if not predictions:  # of a multi-label set
        return MemberOpinion(predictions=predictions)
    first = predictions[0]
    return MemberOpinion(label=first.label, probability=first.probability, predictions=predictions)
