"""The plan of the traffic, and the figures: each version's share, the shadow, how answers compare.

Versions are called NAME@FINGERPRINT. Plans are immutable: a change makes the next plan, which keeps
the earlier splits for a rollback. The book ``Traffic`` has the plan of all Gateways and the sum of
their figures, which are all counts and sums.

The same photo, or the same caller, keeps its version. The method is weighted rendezvous hashing:
each version draws a number from the hash of the key and of its own name, and the lowest draw
divided by the version's share answers. If one share grows, keys move only to that version.
"""

import hashlib
import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import Field

from app.answers import OTHER_WORK, Classified, Fault
from app.errors import BadParameterError, PlanChangedError
from app.graph.hub_link import Book
from app.graph.request import RequestAnswers
from app.setting_values import check_shares
from app.telemetry.metric_table import BUCKETS_MS
from models.ensemble import AnswerRule, Probabilities
from models.record import Z95, wilson_interval

MAX_EARLIER = 10  # splits that a plan keeps: for rollbacks, and of the last revisions
HASHED_BYTES = 64 * 2**10  # The beginning of a file and its length suffice to tell photos apart.
Interval = tuple[float, float]
MAX_DISAGREEMENTS = 20  # The newest of each pair of versions are kept.


@dataclass(frozen=True)
class Split:
    """The percentage of requests that each version answers, 100 in sum, and the shadow."""

    shares: Mapping[str, float]
    shadow: str | None = None

    def __post_init__(self) -> None:
        """Raise :class:`BadParameterError` if the shares are invalid."""
        try:
            check_shares(self.shares)
        except ValueError as error:
            raise BadParameterError(str(error)) from error
        if self.shadow is not None and self.shares.get(self.shadow):
            raise BadParameterError(
                f"{self.shadow} is the shadow and answers {self.shares[self.shadow]:g} % of "
                "requests; name another shadow, or leave it out"
            )

    @property
    def main(self) -> str:
        """The version that answers most requests; the first of several with equal shares."""
        return max(self.shares, key=lambda name: self.shares[name])

    @property
    def answering(self) -> tuple[str, ...]:
        """The versions with a share over 0."""
        return tuple(name for name, share in self.shares.items() if share > 0)

    @property
    def versions(self) -> tuple[str, ...]:
        """Every version that the split names, the shadow last."""
        shadow = [] if self.shadow is None else [self.shadow]
        return tuple(dict.fromkeys((*self.shares, *shadow)))

    def promoted(self, version: str) -> Self:
        """Return the split in which ``version`` answers every request."""
        shadow = None if self.shadow == version else self.shadow
        return replace(self, shares={version: 100.0}, shadow=shadow)

    def as_dict(self) -> dict[str, Any]:
        return {"shares": dict(self.shares), "shadow": self.shadow}

    def __str__(self) -> str:
        """Return the split as messages show it."""
        shares = ", ".join(f"{name} {share:g} %" for name, share in self.shares.items() if share)
        return shares if self.shadow is None else f"{shares}, shadow {self.shadow}"

    @classmethod
    def of(cls, content: Any) -> Self:
        """Read :meth:`as_dict`'s form; ``shadow`` may be left out.

        Raises:
            BadParameterError: ``content`` has another form, or the shares are invalid.
        """
        if not isinstance(content, dict) or not isinstance(shares := content.get("shares"), dict):
            raise BadParameterError('send {"shares": {"NAME@VERSION": 95, ...}, "shadow": null}')
        for name, share in shares.items():
            if isinstance(share, bool) or not isinstance(share, int | float):
                raise BadParameterError(f"the share of {name[:80]} is no number: send a percentage")
        if not isinstance(shadow := content.get("shadow"), str | None):
            raise BadParameterError("shadow is not a string: send NAME@VERSION, or null")
        return cls({name: float(share) for name, share in shares.items()}, shadow)


@dataclass(frozen=True)
class Plan:
    """A split, its revision, and the earlier splits, the newest first.

    ``earlier`` are those that a rollback returns to, ``recent`` those of the revisions before.
    ``origin`` is a hash of the first split. While a new deploy replaces a service, it tells the
    plans of the two apart.
    """

    split: Split
    origin: str
    revision: int = 0
    earlier: tuple[Split, ...] = ()
    recent: tuple[Split, ...] = ()

    @classmethod
    def first(cls, split: Split) -> Self:
        """Return the first plan, of the split in the settings."""
        shares = {name: float(share) for name, share in split.shares.items()}
        text = json.dumps([shares, split.shadow], sort_keys=True)
        return cls(split, hashlib.sha256(text.encode()).hexdigest()[:12])

    @property
    def order(self) -> tuple[int, str]:
        """What the newest plan has most of: the revision, then its text.

        Two books may each have made a plan of one revision: everybody takes the same of them.
        """
        return self.revision, repr(self)  # of strings and numbers: the same in every process

    def merged(self, other: Self) -> Self:
        """Return the newer of two plans."""
        return max(self, other, key=lambda plan: plan.order)

    def check_seen(self, revision: int | None) -> None:
        """Raise :class:`PlanChangedError` if a change was made from another revision."""
        if revision is None or (ago := self.revision - revision) == 0:
            return
        was = f" in place of {self.recent[ago - 1]}" if 0 < ago <= len(self.recent) else ""
        raise PlanChangedError(
            f"the plan is at revision {self.revision}, and yours was made from {revision}: it is "
            f"{self.split}{was}; look at it again (tandem traffic), then change it"
        )

    @property
    def named(self) -> set[str]:
        """The versions of this split, of the splits before, and of those to roll back to."""
        splits = (self.split, *self.earlier, *self.recent)
        return {name for split in splits for name in split.versions}

    def changed(self, split: Split) -> Self:
        """Return the next plan, with this split."""
        return self._next(split, (self.split, *self.earlier)[:MAX_EARLIER])

    def _next(self, split: Split, earlier: tuple[Split, ...]) -> Self:
        recent = (self.split, *self.recent)[:MAX_EARLIER]
        return replace(
            self, split=split, revision=self.revision + 1, earlier=earlier, recent=recent
        )

    def rolled_back(self) -> Self:
        """Return the next plan, with the split before this one.

        Raises :class:`BadParameterError` if this is the first plan.
        """
        if not self.earlier:
            raise BadParameterError(
                "there is no earlier plan: this is the plan that the service began with; change it "
                "with tandem traffic set"
            )
        return self._next(self.earlier[0], self.earlier[1:])


def sticky_key(value: str | None, data: bytes) -> bytes:
    """Return a hash of the header's ``value``, or of the file ``data`` if there is no header."""
    if value is not None:
        return hashlib.blake2b(value.encode("utf-8", "replace"), digest_size=16).digest()
    digest = hashlib.blake2b(data[:HASHED_BYTES], digest_size=16)
    digest.update(len(data).to_bytes(8, "little"))
    return digest.digest()


def chosen(key: bytes, shares: Mapping[str, float]) -> str:
    """Return the version that answers a key: each is chosen in proportion to its share."""
    draws = {name: _draw(key, name) / share for name, share in shares.items() if share > 0}
    return min(draws, key=draws.__getitem__)


def _draw(key: bytes, name: str) -> float:
    """Return an exponentially distributed number that the key and the name determine."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=key).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / 2**64)


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


class BookStatus(NamedTuple):
    """The plan, the revision that each live Gateway serves, and the sum of all figures."""

    plan: Plan
    gateways: list[int]
    figures: Figures


class TrafficBook(Book[Plan, Figures]):
    """Holds the plan and the Gateways' figures; Gateways that have a newer plan report it."""

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(plan, clock)
        self._past = Figures()  # of Gateways that were silent for longer

    def change(self, split: Split | None, revision: int | None) -> int:
        """Make the next plan and return its revision; ``split`` None rolls the last change back.

        Raises:
            PlanChangedError: ``revision`` is not the newest plan's.
            BadParameterError: there is no earlier split.
        """
        self.facts.check_seen(revision)
        self.facts = self.facts.rolled_back() if split is None else self.facts.changed(split)
        return self.facts.revision

    def status(self) -> BookStatus:
        """Return the plan and the figures of all Gateways; each Gateway's count once."""
        total = Figures()
        for figures in (self._past, *(of for *_, of in self._reports.values())):
            total.add(figures)
        return BookStatus(self.facts, self.revisions(), total)

    def _forget(self, more: Figures) -> None:
        self._past.add(more)
