"""The answer of ``/v1/models``, as dataclasses whose schema /docs shows."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema, WithJsonSchema

from app.settings import Settings
from models.image import Size
from models.ledger import judge
from models.machine import installed_version
from models.manifest import MemberRecord
from models.model_set import ModelSet
from models.plan import PlanName
from models.record import Precision, RuntimeName

# OpenAPI 3.0 has no tuples.
SIZES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
SERVED_SIZE = {
    "anyOf": [{"type": "integer"}, SIZES],
    "description": "px: the side of a square, or height and width",
}
ServedSize = Annotated[Size, WithJsonSchema(SERVED_SIZE)]


@dataclass(slots=True)
class ServedRuntime:
    """The runtime of a member's network."""

    name: RuntimeName
    version: Annotated[str, Field(description="version of its package on the Gateway's node")]


@dataclass(slots=True)
class ServedMember:
    """One member of the served set."""

    name: str
    precision: str
    input_size: ServedSize
    weight: float
    source: str
    runtime: ServedRuntime


@dataclass(slots=True, kw_only=True)
class ServedModels:
    """The answer of /v1/models."""

    model_set: str
    model_version: Annotated[
        str, Field(description="the set's fingerprint, as in answers: a hash of all they depend on")
    ]
    description: str
    hint: str
    task: Annotated[
        str,
        Field(
            description="classification (classes exclude each other, probabilities sum to 1) or "
            "multi_label (a score for each class by itself)"
        ),
    ]
    threshold: Annotated[
        float | SkipJsonSchema[None],
        Field(description="multi_label sets only: labels with at least this score are listed"),
    ] = None
    input_size: ServedSize
    resize_shorter: Annotated[
        int,
        Field(
            description="px: the largest size to which a member has a picture's shorter side "
            "scaled; twice that is enough to send"
        ),
    ]
    labels: list[str]
    max_drop: Annotated[
        float,
        Field(
            description="the largest drop by INT8 that the set accepts, as a fraction of top-1 "
            "(multi_label sets: mAP or micro-F1)"
        ),
    ]
    verified: Annotated[
        str,
        Field(
            description="verified, unmeasured, unknown (measured on too few images to tell), or "
            "dropped (over max_drop)"
        ),
    ]
    members: list[ServedMember]
    accuracy: list[dict[str, Any]]
    sure: Annotated[
        dict[str, Any] | SkipJsonSchema[None],
        Field(
            description="the probability from which on an answer is sure; the share of sure "
            "answers and their accuracy, on images that it was not chosen by (measured_on), and "
            "how many images of other classes are sure (foreign)"
        ),
    ] = None
    plan: Annotated[
        PlanName, Field(description="how requests are answered that do not ask for a plan")
    ] = "full"
    fast_plan: Annotated[
        dict[str, Any] | SkipJsonSchema[None],
        Field(
            description="the members that a fast answer asks, in steps, each with the probability "
            "from which on its answer stands; and what that was measured to cost and to lose"
        ),
    ] = None
    answer_set: Annotated[
        dict[str, Any] | SkipJsonSchema[None],
        Field(description="the bound of answer sets, their coverage and mean size"),
    ] = None
    preprocess: Annotated[
        str | SkipJsonSchema[None],
        Field(
            description="the own function between decoder and members, of the operator or "
            "of the set; if set"
        ),
    ] = None
    combine: Annotated[
        str | SkipJsonSchema[None],
        Field(description="the operator's own function in place of the average; if set"),
    ] = None
    model_sets: Annotated[
        list[str] | SkipJsonSchema[None],
        Field(description="names of all sets, the default first, if several are served"),
    ] = None
    models: Annotated[
        list[str] | SkipJsonSchema[None],
        Field(description="names of all sets, as KServe's V1 protocol has them"),
    ] = None


def describe(model_set: ModelSet, settings: Settings, all_sets: list[str]) -> ServedModels:
    """Describe a set as it is served, with the names of all sets, the default first."""
    manifest, precision = model_set.manifest, settings.served_precision
    fast_plan = None if settings.combine else manifest.usable_plan(precision)
    return ServedModels(
        model_set=manifest.name,
        model_version=model_set.fingerprint(precision),
        description=manifest.description,
        hint=manifest.hint,
        task=manifest.task,
        threshold=manifest.threshold,
        input_size=manifest.image.input_size,
        resize_shorter=max(rule.needed_shorter for rule in manifest.inputs.rules),
        labels=list(model_set.labels),
        max_drop=manifest.max_drop,
        verified=judge(manifest, precision).status,
        members=[
            ServedMember(
                name=m.name,
                precision=m.precision_of(precision),
                input_size=manifest.image_of(m.name).input_size,
                weight=m.weight,
                source=m.source,
                runtime=_runtime_of(m, precision),
            )
            for m in manifest.members
        ],
        accuracy=[record.model_dump(mode="json") for record in manifest.accuracy],
        sure=manifest.sure.model_dump(mode="json") if manifest.sure else None,
        plan=settings.plan,
        fast_plan=fast_plan.model_dump(mode="json", exclude_none=True) if fast_plan else None,
        answer_set=manifest.answer_set.model_dump(mode="json") if manifest.answer_set else None,
        preprocess=settings.preprocess or manifest.preprocess,
        combine=settings.combine,
        model_sets=all_sets if len(all_sets) > 1 else None,
        models=all_sets,
    )


def _runtime_of(member: MemberRecord, precision: Precision) -> ServedRuntime:
    """Return a member's runtime and its installed version, without importing the runtime."""
    name = member.network(precision).runtime
    return ServedRuntime(name, installed_version(name) or "unknown")
