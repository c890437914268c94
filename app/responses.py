"""Response models of the HTTP interface (pydantic): what /docs shows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from app.messages import Combined, Fault


class Prediction(BaseModel):
    """One class and its probability, 0..1."""

    index: int
    label: str
    probability: float


class MemberOpinion(BaseModel):
    """What one member alone says: its first choice, and its own top-k."""

    label: str
    probability: float
    predictions: list[Prediction]


class StageTiming(BaseModel):
    """One bar of the timeline; times in ms from the request's arrival at the Gateway.

    ``read`` is the body, ``decode`` the pixels, ``queue`` and ``infer`` a member's, ``combine`` the
    average. What lies between two bars is transport.
    """

    stage: str
    # Left out of the answer rather than null, which OpenAPI 3.0 has no type for.
    member: str | SkipJsonSchema[None] = None
    start_ms: float
    duration_ms: float
    batch_size: int | SkipJsonSchema[None] = None


class Timings(BaseModel):
    """Where the request's milliseconds went."""

    total: float
    stages: list[StageTiming]


class Classified(BaseModel):
    """The answer for one image."""

    model_set: str
    predictions: list[Prediction]
    members: dict[str, MemberOpinion]
    agreement: bool = Field(description="all members have the same first choice")
    degraded: bool = Field(description="fewer members answered than were asked")
    # Left out unless there are some.
    skipped_members: list[str] | SkipJsonSchema[None] = Field(
        None, description="not asked: by cascade_margin, the first member was sure enough alone"
    )
    missing_members: dict[str, str] | SkipJsonSchema[None] = Field(
        None, description="did not answer, and why: late, not_asked (it failed lately), or a code"
    )
    request_id: str
    timings_ms: Timings


class ErrorDetail(BaseModel):
    """What was wrong, the limit, and what to do next."""

    code: str
    message: str
    request_id: str


class ErrorAnswer(BaseModel):
    """Every status from 400 up has this body."""

    error: ErrorDetail


class Results(BaseModel):
    """The answer for a multipart request: one entry per file, in order."""

    results: list[Classified | ErrorAnswer]
    request_id: str


class ServedMember(BaseModel):
    """One member of the served set."""

    name: str
    precision: str
    weight: float
    source: str


class ServedModels(BaseModel):
    """The answer of /v1/models."""

    model_set: str
    description: str
    hint: str
    input_size: int
    labels: list[str]
    max_drop: float = Field(description="of INT8's top-1 that the set accepts, a fraction")
    verified: str = Field(description="verified, unmeasured, or dropped (over max_drop)")
    members: list[ServedMember]
    accuracy: list[dict[str, Any]]
    cascade_margin: float | SkipJsonSchema[None] = Field(
        None, description="of the first member, from which on the others are not asked; if set"
    )


class Ready(BaseModel):
    """The answer of /readyz and /healthz."""

    ready: bool


def error_answer(fault: Fault, request_id: str) -> ErrorAnswer:
    """Dress a fault for the outside."""
    detail = ErrorDetail(code=fault.code, message=fault.message, request_id=request_id)
    return ErrorAnswer(error=detail)


def classified(
    combined: Combined,
    model_set: str,
    skipped: Sequence[str],
    missing: Mapping[str, str],
    request_id: str,
    timings: Timings,
) -> Classified:
    """Dress the Combiner's answer for the outside; ``skipped`` members were not asked.

    ``missing`` ones should have answered; the value says why they did not (a code).
    """
    members = {}
    for name, predictions in combined.members.items():
        rows = [Prediction(**asdict(prediction)) for prediction in predictions]
        first = rows[0]
        members[name] = MemberOpinion(
            label=first.label, probability=first.probability, predictions=rows
        )
    return Classified(
        model_set=model_set,
        predictions=[Prediction(**asdict(prediction)) for prediction in combined.predictions],
        members=members,
        agreement=combined.agreement,
        degraded=bool(missing),
        skipped_members=list(skipped) or None,
        missing_members=dict(missing) or None,
        request_id=request_id,
        timings_ms=timings,
    )
