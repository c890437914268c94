"""Reads, changes and promotes the traffic, for ``/v1/traffic`` and ``tandem traffic``.

The deployment ``Traffic`` owns the plan of all Gateways. A Gateway sends it figures and receives
the newest plan.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from app.errors import BadParameterError, ConfigError, PlanChangedError
from app.graph.hub_link import HubLink
from app.graph.served_models import check_accuracy, served_sets
from app.settings import Settings
from app.traffic.plan import BookStatus, Comparison, Disagreement, Plan, Split, VersionFigures
from models.ledger import judge
from models.model_set import ModelSet
from models.record import Precision, wilson_interval

if TYPE_CHECKING:  # it imports Ray, and tandem serve imports this module before
    from app.traffic.graph import TrafficGraph

logger = logging.getLogger("ray.serve")
EXPECTED = '{"shares": {"NAME@VERSION": 95, ...}, "shadow": null} or {"rollback": true}'
EVERYWHERE_S = 5.0  # how long a change waits for the other Gateways
AGAIN_AFTER_S = 30.0  # the pause before a version that could not be loaded is tried again
Bounds = Annotated[list[float], Field(description="95 % interval")]
# Fields that are None are left out of the answer: OpenAPI 3.0 has no type for null.
Milliseconds = float | SkipJsonSchema[None]
MIN_COMPARED = 200  # photos; if all 200 agree, the 95 % interval begins at 0.981
MIN_AGREEMENT = 0.95
MAX_FAILED = 0.01  # of a version's answers to clients


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
class TrafficStatus(SplitStatus):
    """The plan, how many Gateways serve it, and the sum of their figures."""

    revision: int
    main: Annotated[str, Field(description="the version with the largest share")]
    earlier: Annotated[list[SplitStatus], Field(description="splits that a rollback returns to")]
    num_gateways: int
    num_current: Annotated[int, Field(description="Gateways that serve this revision")]
    versions: dict[str, VersionStatus]
    comparisons: list[ComparisonStatus] = field(default_factory=list)


class TrafficControl(HubLink):
    """The traffic of all Gateways, as one Gateway reads and changes it.

    Args:
        handle: of the deployment that owns the plan; it gets a report every second.
        graph: this Gateway's.
        refused: each loaded version with the reason why it must not answer, or None.
        load: loads a version by name. With True, for a version that is to answer clients, it
            refuses a version that lost too much accuracy.
        unload: frees a version by name, once no request uses it.
    """

    def __init__(
        self,
        handle: Any,
        graph: "TrafficGraph",
        refused: Mapping[str, str | None],
        load: Callable[[str, bool], Awaitable[None]],
        unload: Callable[[str], None],
    ) -> None:
        super().__init__(handle, "Traffic")
        self._graph, self._refused, self._load, self._unload = graph, refused, load, unload
        self._asked: Counter[str] = Counter()  # versions of the changes that are being made

    async def status(self) -> TrafficStatus:
        """Return the plan and the figures of all Gateways.

        Raises :class:`NotReadyError` if the deployment Traffic does not answer.
        """
        return status_of(await self._book(), self._refused)

    async def change(self, content: dict[str, Any]) -> TrafficStatus:
        """Make a request's change, wait for all Gateways, and return :meth:`status`.

        Raises:
            BadParameterError: the request is malformed, or a version must not answer clients.
            UnknownModelError: no version has a name that the request gives.
            TandemError: a version cannot be loaded.
            PlanChangedError: the request was made from a plan that is no longer the newest; or
                another plan replaced this one meanwhile.
            NotReadyError: the deployment Traffic does not answer.
        """
        if content.keys() - {"shares", "shadow", "rollback", "revision"}:
            raise BadParameterError(f"send {EXPECTED}; the revision that you saw is optional")
        revision, is_rollback = content.get("revision"), content.get("rollback", False)
        if revision is not None and (isinstance(revision, bool) or not isinstance(revision, int)):
            raise BadParameterError("revision is not an integer: send that of GET /v1/traffic")
        if is_rollback is True and not content.keys() & {"shares", "shadow"}:
            await self._change(None, revision)
        elif is_rollback is False:
            split = Split.of(content)
            if revision is not None:  # checked first: building versions takes seconds
                (await self._book()).plan.check_seen(revision)
            self._asked.update(split.versions)
            kept_s = 0.0
            try:
                # The loaded ones first: a refused one of them is known before others are built.
                for name in sorted(split.versions, key=lambda name: name not in self._refused):
                    await self._load(name, name in split.answering)
                await self._change(split, revision)
            except asyncio.CancelledError:
                kept_s = AGAIN_AFTER_S  # the client went; it may ask again for what is being built
                raise
            finally:
                loop = asyncio.get_running_loop()
                loop.call_later(kept_s, self._forget, split.versions)
        else:
            raise BadParameterError(f"rollback must be true, without shares: send {EXPECTED}")
        return await self.status()

    def _forget(self, names: Iterable[str]) -> None:
        self._asked.subtract(names)
        self._asked = +self._asked

    async def _change(self, split: Split | None, revision: int | None) -> None:
        """Change the plan and wait for all Gateways; ``split`` None rolls the last change back."""
        await self._exchange()  # a restarted book learns the newest plan from this report
        new = await self.call("change", split, revision)
        await self._everywhere(new, EVERYWHERE_S)
        plan = (await self.call("status")).plan
        if plan.revision != new and (split is None or plan.split != split):
            raise PlanChangedError(
                f"revision {plan.revision} replaced this change, revision {new}: look at the "
                "traffic again (tandem traffic), then change it"
            )

    async def _book(self) -> BookStatus:
        """Return :meth:`app.traffic.plan.TrafficBook.status`, with this Gateway's latest figures.

        Raises :class:`NotReadyError` if the deployment does not answer.
        """
        await self._exchange()
        status: BookStatus = await self.call("status")
        return status

    async def _exchange(self) -> None:
        newest = await self._report()
        if newest is not None and newest.order > self._graph.plan.order and self._has_all(newest):
            self._graph.take(newest)
            # Reported at once: whoever changed the plan waits for all Gateways to have it.
            await self._report()
        if newest is not None:
            kept = self._graph.plan.named | newest.named | (+self._asked).keys()
            for name in [name for name in self._graph.versions if name not in kept]:
                self._unload(name)

    async def _report(self) -> Plan | None:
        """Report; return the newest plan, or None if the deployment belongs to a newer service."""
        # A copy, since Serve serialises it later on another thread.
        figures = deepcopy(self._graph.figures)
        newest: Plan | None = await self.call("report", self._gateway, self._graph.plan, figures)
        return newest

    def _has_all(self, plan: Plan) -> bool:
        """Whether all versions of a plan are loaded; if not, begin to load them."""
        missing = [name for name in plan.split.versions if name not in self._graph.versions]
        if missing:
            self._load_soon(partial(self._load_all, missing))
        return not missing

    async def _load_all(self, names: list[str]) -> None:
        for name in names:
            try:
                await self._load(name, False)
            except Exception:
                logger.exception("%s cannot be loaded; this Gateway keeps its present plan", name)
                await asyncio.sleep(AGAIN_AFTER_S)


def status_of(book: BookStatus, loaded: Mapping[str, str | None]) -> TrafficStatus:
    """Return the answer of ``GET /v1/traffic``.

    Args:
        book: :meth:`app.traffic.plan.TrafficBook.status`.
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


def candidate(status: Mapping[str, Any], asked: str | None) -> str:
    """Return the version to promote: ``asked``, or the only version in traffic besides the main.

    Args:
        status: the answer of ``GET /v1/traffic``.
        asked: NAME@VERSION that the user asked for, or None.

    Raises:
        BadParameterError: ``asked`` is not loaded or answers every request already; or nothing
            was asked for and there are several candidates, or none.
    """
    shares: dict[str, float] = status["shares"]
    main: str = status["main"]
    others: list[str] = [name for name in status["versions"] if name != main]
    if asked is not None:
        if asked == main and shares[main] == 100:
            raise BadParameterError(f"{asked} answers every request already")
        if asked not in status["versions"]:
            raise BadParameterError(
                f"{asked} is not loaded; there are {', '.join(status['versions'])}"
            )
        return asked
    in_traffic = [name for name in others if shares.get(name) or name == status.get("shadow")]
    if len(in_traffic) == 1:
        return in_traffic[0]
    names = ", ".join(in_traffic or others) or "none"
    raise BadParameterError(f"name a version: {main} answers most requests, and there are {names}")


def refusals(
    status: Mapping[str, Any], version: str, min_compared: int, min_agreement: float
) -> list[str]:
    """Return the reasons against promoting ``version``, each with figures; empty if it may be.

    Args:
        status: the answer of ``GET /v1/traffic``.
        version: NAME@VERSION.
        min_compared: how many photos both it and the main version must have answered.
        min_agreement: what the lower end of the agreement's 95 % interval must reach, 0 to 1.
    """
    main, figures = status["main"], status["versions"][version]
    reasons = []
    if (refused := figures.get("refused")) is not None:
        reasons.append(refused)
    if version == main:
        return reasons  # the main version is the reference: there is nothing to compare it with
    failed, copies_failed = int(figures["failed"]), int(figures["copies_failed"])
    if failed > MAX_FAILED * (answers := figures["answered"] + failed):
        reasons.append(
            f"{failed} of its {answers} answers to clients failed, {failed / answers:.1%}: more "
            f"than {MAX_FAILED:.1%}; the service's log says why"
        )
    pairs: Sequence[Mapping[str, Any]] = status["comparisons"]
    pair = next((p for p in pairs if (p["reference"], p["version"]) == (main, version)), None)
    compared = 0 if pair is None else int(pair["compared"])
    if compared < min_compared:
        reasons.append(
            f"{compared} photos were compared with {main}, {min_compared - compared} fewer than "
            f"{min_compared}: wait, or lower --min-compared"
        )
    if not (copied := compared + copies_failed):
        return reasons
    agreed = 0 if pair is None else int(pair["agreed"])
    low, _ = wilson_interval(agreed, copied)
    if low < min_agreement:
        and_failed = f" and {copies_failed} that it failed on" if copies_failed else ""
        reasons.append(
            f"it agrees with {main} on {agreed} of {compared} photos{and_failed}, "
            f"{agreed / copied:.1%} (95 %: from {low:.1%}): {min_agreement - low:.1%} below "
            f"{min_agreement:.1%} (--min-agreement)"
        )
    return reasons


def loaded_sets(settings: Settings) -> list[ModelSet]:
    """Load the sets that the settings serve: versions of one set, or several sets.

    Raises what :func:`served_versions` and :func:`app.graph.served_models.served_sets` raise.
    """
    return served_versions(settings) if settings.has_versions else served_sets(settings)


def accuracy_warnings(settings: Settings, model_sets: list[ModelSet]) -> list[str]:
    """Return the warnings of the accuracy records of sets from :func:`loaded_sets`.

    Raises:
        UnverifiedError: a set that is to answer lost too much; for a shadow it is a warning.
    """
    shares = _shares(settings) if settings.has_versions else [100.0] * len(model_sets)
    warnings = []
    for model_set, share in zip(model_sets, shares, strict=True):
        verdict = judge(model_set.manifest, settings.served_precision, model_set.argument)
        if share:
            verdict = check_accuracy(model_set, settings)
        if verdict.status != "verified":
            warnings.append(verdict.message)
    return warnings


def _shares(settings: Settings) -> list[float]:
    """Return the share of each version that the settings name, in their order."""
    shares = settings.traffic or {settings.model_set: 100.0}
    return [shares.get(own.model_set, 0.0) for own in settings.of_each_version()]


def served_versions(settings: Settings) -> list[ModelSet]:
    """Load the versions that the settings name, the one with the largest share first.

    Raises:
        ModelSetError: a version cannot be loaded.
        ConfigError: two versions are the same, or of different sets or classes.
    """
    served = settings.served_precision
    sets = [own.load_set() for own in settings.of_each_version()]
    for first, other in combinations(sets, 2):
        check_fits(first, other)
        if (name := version_name(other, served)) == version_name(first, served):
            raise ConfigError(
                f"traffic and shadow name {name} twice: versions differ in what they answer; leave "
                "one out"
            )
    return sets


def version_name(model_set: ModelSet, served: Precision) -> str:
    """Return NAME@FINGERPRINT."""
    return f"{model_set.name}@{model_set.fingerprint(served)}"


def check_fits(main: ModelSet, other: ModelSet) -> None:
    """Raise :class:`ConfigError` unless both have the same name, task and classes."""
    if main.name != other.name:
        raise ConfigError(
            f"traffic splits requests between versions of one set, and {main.name} and "
            f"{other.name} are two sets: serve several sets with model_sets"
        )
    if main.manifest.task != other.manifest.task:
        raise ConfigError(
            f"versions of {main.name} have the tasks {main.manifest.task} and "
            f"{other.manifest.task}: clients would get answers of two kinds"
        )
    what, ours, theirs = _classes(main, other)
    if ours == theirs:
        return
    if sorted(ours) == sorted(theirs):
        if twice := _some([name for name in dict.fromkeys(ours) if ours.count(name) > 1]):
            raise ConfigError(
                f"{other.folder} has the {what} of {main.folder} in another order, and several "
                f"classes are called {twice}: give both sets class ids (tandem models add "
                "--class-ids), each its own"
            )
        return
    missing, new = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    raise ConfigError(
        f"{other.folder} has other {what} than {main.folder}: {_some(missing) or 'none'} are "
        f"missing, {_some(new) or 'none'} are new; make the version with the same classes (their "
        "order is free), or serve it as a set of its own (model_sets)"
    )


def class_places(reference: ModelSet, version: ModelSet) -> list[int] | None:
    """Return the index in ``version`` of each class of ``reference``; None if they are equal.

    Both fit (:func:`check_fits`).
    """
    _, ours, theirs = _classes(reference, version)
    if ours == theirs:
        return None
    place_of = {name: place for place, name in enumerate(theirs)}
    return [place_of[name] for name in ours]


def _classes(main: ModelSet, other: ModelSet) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the classes of both in order: their ids if both sets have ids, else their labels."""
    if main.class_ids is not None and other.class_ids is not None:
        return "class ids", main.class_ids, other.class_ids
    return "labels", main.labels, other.labels


def _some(names: list[str]) -> str:
    text = ", ".join(names[:3])
    return f"{text} and {len(names) - 3} more" if len(names) > 3 else text


def first_split(settings: Settings, versions: list[ModelSet]) -> Split:
    """Return the split that the settings ask for; ``versions`` are from :func:`served_versions`."""
    of_settings = [own.model_set for own in settings.of_each_version()]
    names = [version_name(model_set, settings.served_precision) for model_set in versions]
    shares = dict(zip(names, _shares(settings), strict=True))
    shadow = None if settings.shadow is None else names[of_settings.index(settings.shadow)]
    return Split(shares, shadow)
