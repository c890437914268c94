"""The served model sets: their checks before they are served, and the answer of ``/v1/models``.

The checks are of their names, INT8's accuracy, and the settings. They also decide ``precision:
auto``: INT8 where this CPU computes it right, else the float networks. The answer is dataclasses,
whose schema /docs shows.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema, WithJsonSchema

from app.errors import ConfigError, UnverifiedError
from app.settings import Settings
from models import golden
from models.ensemble import PlanName
from models.errors import ModelSetError
from models.image import Size
from models.ledger import Verdict, judge
from models.machine import available_cpus, installed_version
from models.manifest import MemberRecord
from models.model_set import ModelSet
from models.network import RuntimeOptions, load
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
    embedding: Annotated[
        int | SkipJsonSchema[None],
        Field(description="the length of its embedding, if the set's manifest says it"),
    ] = None


@dataclass(slots=True, kw_only=True)
class ServedModels:
    """The answer of /v1/models."""

    model_set: str
    model_version: Annotated[
        str, Field(description="the set's fingerprint, as in answers: a hash of all they depend on")
    ]
    description: str
    hint: Annotated[
        str,
        Field(
            description="how who operates the service gets more classes; empty for others, by the "
            "setting operator_hints"
        ),
    ]
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
    teach: Annotated[
        bool | SkipJsonSchema[None],
        Field(description="true if the service takes photographs of these classes (/v1/teach)"),
    ] = None
    operator_hints: Annotated[
        bool | SkipJsonSchema[None],
        Field(description="true if the page shows commands for who operates the service"),
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
                embedding=m.network(precision).features,
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
        teach=settings.teach or None,
    )


def _runtime_of(member: MemberRecord, precision: Precision) -> ServedRuntime:
    """Return a member's runtime and its installed version, without importing the runtime."""
    name = member.network(precision).runtime
    return ServedRuntime(name, installed_version(name) or "unknown")


def served_sets(settings: Settings) -> list[ModelSet]:
    """Load the sets that the settings name, the default first.

    Raises:
        ModelSetError: a set cannot be loaded.
        ConfigError: two sets, or a set and a member of another, have the same name; or
            ``set_weights`` names a set that is not served.
    """
    sets = [own.load_set() for own in settings.of_each_set()]
    check_names(sets)
    names = [model_set.name for model_set in sets]
    if unknown := next((name for name in settings.set_weights or {} if name not in names), None):
        raise ConfigError(
            f"set_weights names {unknown!r}, which is not served; the served sets are "
            f"{', '.join(names)}"
        )
    return sets


def check_names(sets: Iterable[ModelSet]) -> None:
    """Raise :class:`ConfigError` if two sets, or a set and another's member, share a name."""
    counts: Counter[str] = Counter()  # of the names that requests use
    for model_set in sets:
        members = (f"{model_set.name}.{member.name}" for member in model_set.manifest.members)
        counts.update((model_set.name, *members))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(
            f"model_sets has {twice[0]} twice, so that a request could not choose between them; "
            "leave one out, or change the name in its manifest"
        )


def check_accuracy(model_set: ModelSet, settings: Settings) -> Verdict:
    """Return the verdict of the set's accuracy record.

    Raises:
        UnverifiedError: INT8 lost more than ``max_drop``, beyond chance, and ``allow_unverified``
            is off.
    """
    verdict = judge(model_set.manifest, settings.served_precision, model_set.argument)
    if verdict.status == "dropped" and not settings.allow_unverified:
        raise UnverifiedError(verdict.message)
    return verdict


def refused_by_gate(model_set: ModelSet, settings: Settings) -> str | None:
    """Return why a version must not answer: its INT8 lost too much; None if it may."""
    try:
        check_accuracy(model_set, settings)
    except UnverifiedError as error:
        return error.message
    return None


def check_plan(settings: Settings, model_set: ModelSet) -> None:
    """Check that a set has the fast plan that the settings ask for.

    Raises:
        ConfigError: the set has none that was made for its networks.
    """
    wanted = "plan" if settings.plan == "fast" else "when_full"
    if settings.plan != "fast" and settings.when_full != "fast":
        return
    precision = settings.served_precision
    problem = model_set.manifest.plan_problem(precision, model_set.argument)
    if problem is not None:
        raise ConfigError(f"{wanted} is fast, and {problem}; or leave {wanted} out")


def decided(settings: Settings, *model_sets: ModelSet) -> tuple[Settings, str | None]:
    """Return the settings with one precision for all sets, and the reason if it is not INT8.

    Every INT8 network is compiled and run here; each replica still checks what it serves.

    Raises:
        ModelSetError: a network is missing or altered, or there are no float networks to use.
    """
    if settings.precision != "auto":
        return settings, None
    size = settings.batch_sizes[-1]
    problems = (_problem(model_set, size, settings.compile_cache) for model_set in model_sets)
    if (problem := next(filter(None, problems), None)) is None:
        return settings.model_copy(update={"precision": "INT8"}), None
    try:
        for model_set in model_sets:
            for member in model_set.manifest.members:
                model_set.network_path(member.name, "FP16")
    except ModelSetError as error:
        raise ModelSetError(
            f"precision auto: {problem} And there is no FP16 to take: {error.message}"
        ) from error
    warning = f"precision auto: FP16 is served, not INT8: {problem}"
    return settings.model_copy(update={"precision": "FP16"}), warning


def _problem(model_set: ModelSet, batch_size: int, cache: Path | None) -> str | None:
    """Return why INT8 cannot be served on this machine."""
    options = RuntimeOptions(
        num_threads=available_cpus(),
        batch_sizes=(batch_size,),
        cache_dir=cache,
        float_type=model_set.manifest.float_type,
    )
    for member in model_set.manifest.members:
        precision = member.precision_of("INT8")
        if precision not in member.networks:
            return f"{member.name} has no INT8 network."
        if (expected := model_set.golden) is None:
            continue  # nothing to compare with; replicas warn of it
        network = load(model_set.network_path(member.name, precision), options)
        try:
            golden.check(expected, member.name, precision, network)
        except golden.GoldenMismatchError as error:
            return f"{error.message}."
    return None
