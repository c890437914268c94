"""The answer of ``GET /v1/traffic``, as dataclasses whose schema /docs shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from app.traffic.book import BookStatus
from app.traffic.comparison import Comparison, Disagreement, VersionFigures
from app.traffic.plan import Plan

# Fields that are None are left out of the answer: OpenAPI 3.0 has no type for null.
Milliseconds = float | SkipJsonSchema[None]
Bounds = Annotated[list[float], Field(description="95 % interval")]


@dataclass(slots=True, kw_only=True)
class SplitStatus:
    """Each version's share of requests, and the shadow."""

    shares: Annotated[
        dict[str, float], Field(description="percent by NAME@VERSION; the sum is 100")
    ]
    shadow: str | SkipJsonSchema[None]


@dataclass(slots=True, kw_only=True)
class VersionStatus:
    """A loaded version, and its figures since the Gateways began."""

    share: float
    is_shadow: bool
    answered: Annotated[int, Field(description="images answered to clients")]
    failed: Annotated[int, Field(description="clients' images answered with an error, 5xx")]
    p50_ms: Annotated[Milliseconds, Field(description="median latency, as a bucket's upper bound")]
    p99_ms: Milliseconds
    copies: Annotated[int, Field(description="images computed in the shadow lane")]
    dropped: Annotated[int, Field(description="copies not computed: the service was busy")]
    copies_failed: int
    work_ms: Annotated[
        Milliseconds,
        Field(description="mean of an image: decoding, slowest member, combining, no waiting"),
    ]
    compute_ms: Annotated[Milliseconds, Field(description="mean of an image, summed over members")]
    batch_size: Annotated[Milliseconds, Field(description="mean images of a batch")]
    refused: Annotated[
        str | SkipJsonSchema[None],
        Field(description="why its accuracy record bars it from answering; absent if it may"),
    ]


@dataclass(slots=True, kw_only=True)
class ComparisonStatus:
    """How two versions answered the same live photos."""

    reference: str
    version: str
    compared: int
    agreed: Annotated[int, Field(description="photos with the same first choice")]
    agreement: float
    agreement_interval: Bounds
    total_variation: Annotated[
        float | SkipJsonSchema[None],
        Field(description="mean distance of the probabilities, 0 (the same) to 1"),
    ]
    total_variation_interval: Bounds | SkipJsonSchema[None]
    disagreements: Annotated[list[Disagreement], Field(description="the last ones")]


@dataclass(slots=True, kw_only=True)
class TrafficStatus(SplitStatus):
    """The plan, how many Gateways serve it, and the sum of their figures."""

    revision: int
    main: Annotated[str, Field(description="the version with the largest share")]
    earlier: Annotated[list[SplitStatus], Field(description="splits that a rollback returns to")]
    num_gateways: int
    num_current: Annotated[int, Field(description="Gateways that serve this revision")]
    versions: dict[str, VersionStatus]
    comparisons: list[ComparisonStatus] = field(default_factory=list)


def status_of(book: BookStatus, loaded: Mapping[str, str | None]) -> TrafficStatus:
    """Return the answer of ``GET /v1/traffic``.

    Args:
        book: :meth:`app.traffic.book.TrafficBook.status`.
        loaded: each loaded version with the reason why it must not answer, or None.

    """
    plan, figures, revisions = book.plan, book.figures, book.gateways
    split = plan.split
    versions = {
        name: _version(figures.versions.get(name, VersionFigures()), plan, name, refused)
        for name, refused in loaded.items()
    }
    return TrafficStatus(
        shares=dict(split.shares),
        shadow=split.shadow,
        revision=plan.revision,
        main=split.main,
        earlier=[SplitStatus(shares=dict(s.shares), shadow=s.shadow) for s in plan.earlier],
        num_gateways=len(revisions),
        num_current=sum(revision >= plan.revision for revision in revisions),
        versions=versions,
        comparisons=[_comparison(pair, of) for pair, of in figures.pairs.items()],
    )


def _version(figures: VersionFigures, plan: Plan, name: str, refused: str | None) -> VersionStatus:
    return VersionStatus(
        share=plan.split.shares.get(name, 0.0),
        is_shadow=plan.split.shadow == name,
        answered=figures.answered,
        failed=figures.failed,
        p50_ms=figures.latency_ms(0.5),
        p99_ms=figures.latency_ms(0.99),
        copies=figures.copies,
        dropped=figures.dropped,
        copies_failed=figures.copies_failed,
        work_ms=_mean(figures.work_ms, figures.computed),
        compute_ms=_mean(figures.compute_ms, figures.computed),
        batch_size=_mean(figures.batch_images, figures.computed),
        refused=refused,
    )


def _mean(total: float, number: int) -> float | None:
    return round(total / number, 3) if number else None


def _comparison(pair: str, comparison: Comparison) -> ComparisonStatus:
    reference, version = pair.split()
    agreement, agreement_interval = comparison.agreement or (0.0, (0.0, 1.0))
    variation = comparison.total_variation
    return ComparisonStatus(
        reference=reference,
        version=version,
        compared=comparison.compared,
        agreed=comparison.agreed,
        agreement=agreement,
        agreement_interval=list(agreement_interval),
        total_variation=variation[0] if variation else None,
        total_variation_interval=list(variation[1]) if variation else None,
        disagreements=comparison.disagreements,
    )
