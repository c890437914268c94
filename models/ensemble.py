"""The ensemble's arithmetic: average, top-k, entropy, the rule for an answer; and a set's plans.

In a **classification** set a row is a distribution over exclusive classes, and an answer lists the
likeliest. In a **multi-label** set a row has an independent score for each class, as from a
sigmoid. An answer lists the labels with a score of at least the threshold, perhaps none.
:class:`AnswerRule` makes labels of a row, by the set's task.

The plan ``full`` asks every member. A *fast* plan asks the members in steps: an answer stands once
the average of the members that were asked is likely enough. ``tandem evaluate SET --images DIR
--plan`` chooses it and writes it into the manifest (:class:`PlanRecord`).

A :class:`Trust` belongs to each average that may answer: the temperature of its probabilities, from
which probability it is sure, and which classes make up its answer set. They differ between all
members, some of them, and each step of a plan.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from models.record import Fraction, NumImages, Precision, Record, Temperature

Probabilities = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
LEAST = np.float32(1e-37)  # bounds a probability before its logarithm
DEFAULT_THRESHOLD = 0.5
FEW_CLASSES = 64  # up to this number Python is as fast as NumPy
PlanName = Literal["full", "fast"]
Names = Annotated[tuple[str, ...], Field(min_length=1)]
MAX_STEPS = 3
Steps = npt.NDArray[np.int64]
NO_BOUND = "no probability showed the share of right answers that was asked for"


@dataclass(slots=True)
class Prediction:
    """One class and its probability, 0..1; of a multi-label set, its score."""

    index: int
    label: str
    probability: float


def tempered(rows: Probabilities, temperature: float) -> Probabilities:
    """Return float32 (N, C) with the logits divided by ``temperature`` (Guo et al., 2017)."""
    if temperature == 1:
        return rows
    # NumPy's power would take 1.5 times as long.
    scaled: Probabilities = np.log(np.maximum(rows, LEAST))
    scaled *= np.float32(1 / temperature)
    np.exp(scaled, out=scaled)
    scaled /= scaled.sum(axis=1, keepdims=True)
    return scaled


def average(
    members: Mapping[str, Probabilities], weights: Mapping[str, float], temperature: float = 1.0
) -> Probabilities:
    """Return the weighted mean of the members' probabilities, each float32 (N, C).

    The weights of the members that answered are scaled to sum to one, so the mean stays a
    distribution if a member is missing. ``temperature`` is that of this average
    (:class:`models.ensemble.Trust`).
    """
    if not members:
        raise ValueError("no member answered: there is nothing to average")
    total = sum([weights[name] for name in members])
    mean: Probabilities | None = None  # (N, C)
    for name, rows in members.items():
        share = rows * np.float32(weights[name] / total)
        mean = share if mean is None else np.add(mean, share, out=mean)
    assert mean is not None
    return tempered(mean, temperature)


def reaches(row: Probabilities, bound: float | None) -> bool | None:
    """Whether the first class of a row (C,) reaches a bound; False if NaN, None without one."""
    return None if bound is None else bool(row.max() >= np.float32(bound))


def entropy(row: Probabilities) -> float:
    """Return the uncertainty of a row (C,): Shannon's entropy as a share of the largest, ln C.

    0: a single class has all; 1: all classes are equal. So sets of any size share the scale.
    """
    if len(row) < 2:
        return 0.0
    if len(row) <= FEW_CLASSES:
        total = math.fsum([p * math.log(p) for p in row.tolist() if p > 0])  # 0 ln 0 is 0
    else:
        some = row[row > 0]
        total = float(np.sum(some * np.log(some)))
    return max(0.0, -total / math.log(len(row)))


def top_k(row: Probabilities, labels: Sequence[str], k: int) -> list[Prediction]:
    """Return the ``k`` likeliest classes of a row (C,), likeliest first; ties by lower index."""
    values = row.tolist()
    return [Prediction(i, labels[i], values[i]) for i in _largest(row, values, k)]


def likeliest(row: Probabilities) -> int:
    """Return the index of the likeliest class of a row (C,), the first among ties.

    ``argmax`` releases the GIL, as sorting does; for few values, comparing in Python is faster.
    """
    if len(row) > FEW_CLASSES:
        return int(row.argmax())
    values: list[float] = row.tolist()
    return values.index(max(values))


def _largest(row: Probabilities, values: Sequence[float], k: int) -> Sequence[int]:
    """Return the indices of the ``k`` largest values, in order; ``values`` are the row's.

    NumPy's sorts release the GIL. Getting it back from a decoding thread may cost more than the
    sort, so a few classes are sorted in Python. Of many classes, only candidates for the ``k`` are
    sorted.
    """
    if len(values) <= FEW_CLASSES:
        # A stable sort, so that ties stay in the order of their indices.
        return sorted(range(len(values)), key=values.__getitem__, reverse=True)[:k]
    if 4 * k > len(values):
        whole: list[int] = np.argsort(-row, kind="stable")[:k].tolist()
        return whole
    bound = np.partition(row, -k)[-k]
    candidates = np.flatnonzero(~(row < bound))  # more than k with ties, all with NaN
    best: list[int] = candidates[np.argsort(-row[candidates], kind="stable")[:k]].tolist()
    return best


@dataclass(frozen=True)
class AnswerRule:
    """Interprets the rows (C,) of a set."""

    labels: Sequence[str]  # one per class, in the networks' order
    threshold: float | None = None  # for a multi-label set's scores; None: a classification set

    @property
    def is_multi_label(self) -> bool:
        """Whether a row has an independent score for each class."""
        return self.threshold is not None

    def asked(self, threshold: float | None) -> "AnswerRule":
        """Return the rule with a request's threshold; None keeps the set's."""
        return self if threshold is None else AnswerRule(self.labels, threshold)

    def predictions(self, row: Probabilities, k: int) -> list[Prediction]:
        """Return the classes listed for a row (C,), at most ``k``, the highest first."""
        ranked = top_k(row, self.labels, k)
        if self.threshold is None:
            return ranked
        least = float(np.float32(self.threshold))
        return [prediction for prediction in ranked if prediction.probability >= least]

    def agree(self, rows: Iterable[Probabilities]) -> bool:
        """Whether rows (C,) agree: on the likeliest class, or on all labels of a multi-label set.

        The number of labels that an answer lists does not matter.
        """
        if self.threshold is None:
            return len(set(map(likeliest, rows))) == 1
        first, *others = [above(row, self.threshold) for row in rows]
        return all(bool((first == other).all()) for other in others)

    def answer_set(self, row: Probabilities, set_from: float) -> list[Prediction]:
        """Return the answer set of a row (C,), likeliest first: the first class is always in it."""
        num = max(1, int((row >= np.float32(set_from)).sum()))
        return top_k(row, self.labels, num)

    def entropy(self, row: Probabilities) -> float:
        """Return the uncertainty of a row (C,), from 0 (sure) to 1.

        For a distribution it is Shannon's entropy as a share of the largest possible. For scores it
        is the mean binary entropy of the classes, in bits.
        """
        if self.threshold is None:
            return entropy(row)
        inner = (p for p in row.tolist() if 0 < p < 1)
        total = math.fsum(p * math.log2(p) + (1 - p) * math.log2(1 - p) for p in inner)
        return max(0.0, -total / len(row))


def above(rows: Probabilities, threshold: float) -> Flags:
    """Return which scores of (..., C) are at least the threshold.

    The comparison is in float32, like the scores: otherwise a score of 0.7 would be below 0.7.
    """
    flags: Flags = rows >= np.float32(threshold)
    return flags


class ForeignRecord(Record):
    """How many images of other classes get a sure answer; none of them chose the bound."""

    dataset: str
    num_images: NumImages
    share: Fraction  # of sure answers
    interval: tuple[Fraction, Fraction]  # 95 %, Wilson


class SureRecord(Record):
    """From which probability of its first class on an answer is sure, and what that is worth.

    Chosen on images that show ``target`` with 95 % confidence; ``num_images`` are others.
    """

    probability: Fraction
    target: Fraction  # the required share of right answers among sure ones
    num_images: NumImages
    share: Fraction  # of sure answers
    right: Fraction | None = None  # of sure answers; None: no image was sure
    right_interval: tuple[Fraction, Fraction]  # 95 %, Wilson
    measured_on: str | None = None  # the images; None: not stated
    # How often a wrong answer counts: more than once for images that the networks learned from.
    wrong_weight: Annotated[float, Field(ge=1, le=100)] = 1.0
    foreign: ForeignRecord | None = None  # None: other classes did not choose the bound


class AnswerSetRecord(Record):
    """From which probability on a class is in the answer set; the likeliest class always is.

    A split conformal prediction set: chosen so that it holds the right class with probability
    ``target``. ``num_images`` are other images, on which it was judged.
    """

    probability: Fraction
    target: Fraction
    num_images: NumImages
    coverage: Fraction  # the share of images whose set holds the right class
    mean_size: Annotated[float, Field(ge=1)]  # classes in a set


class AverageRecord(Record):
    """What the average of some members is worth, by the manifest's weights."""

    temperature: Temperature = 1.0  # of the average, besides those of its members
    sure: SureRecord | None = None  # None: no bound was found for it
    answer_set: AnswerSetRecord | None = None


class SubsetRecord(AverageRecord):
    """The average of some members, which answer if the others are missing or left out."""

    members: Names


class StepRecord(AverageRecord):
    """A step of a plan: its figures are of the images that the plan answers here."""

    ask: Names  # members, besides those of the steps before
    # The probability of the average's first class from which on it is the answer. The last step
    # answers always, and has none.
    stop_at: Fraction | None = None
    share: Fraction  # of the images, answered at this step


class PlanFigures(Record):
    """A plan against all members, on the same images."""

    num_images: NumImages
    top1: Fraction
    top1_interval: tuple[Fraction, Fraction]  # 95 %, Wilson
    full_top1: Fraction
    lost: Annotated[float, Field(ge=-1, le=1)]  # top-1 of full minus that of the plan
    lost_interval: tuple[float, float]  # 95 %, of the paired difference
    p_value: Fraction  # McNemar's exact test
    cpu_ms: Annotated[float, Field(gt=0)]  # per image, of the networks, on one thread
    full_cpu_ms: Annotated[float, Field(gt=0)]


class PlanRecord(Record):
    """The fast plan of a set, with its figures on the images that chose it, and on others."""

    steps: Annotated[tuple[StepRecord, ...], Field(min_length=1, max_length=MAX_STEPS)]
    answer_set: AnswerSetRecord | None = None  # of the plan as a whole
    precision: Precision = "INT8"
    made_for: str  # Manifest.plan_key: networks, weights and temperatures that it was chosen with
    dataset: str
    images_sha256: str
    measured: date
    cpu: str
    chosen: PlanFigures  # on the images by which it was chosen
    judged: PlanFigures  # on those that neither fitted nor chose

    @model_validator(mode="after")
    def _steps_lead_to_an_answer(self) -> "PlanRecord":
        names = self.members
        if len(set(names)) != len(names):
            raise ValueError(f"a plan asks each member once, not {', '.join(names)}")
        *others, last = self.steps
        if any(step.stop_at is None for step in others) or last.stop_at is not None:
            raise ValueError("every step of a plan but the last has stop_at, the last has none")
        return self

    @property
    def members(self) -> tuple[str, ...]:
        """All members that the plan may ask, in its order."""
        return tuple(name for step in self.steps for name in step.ask)

    def step_of(self, num_asked: int) -> int | None:
        """Return the step, from 0, that ends when this number of members was asked."""
        total = 0
        for number, step in enumerate(self.steps):
            total += len(step.ask)
            if total == num_asked:
                return number
        return None

    @property
    def key(self) -> str:
        """A short hash of all that the plan's answers depend on, besides the networks."""
        steps = [
            (s.ask, s.stop_at, s.temperature, s.sure and s.sure.probability) for s in self.steps
        ]
        bound = self.answer_set and self.answer_set.probability
        return hashlib.sha256(repr((steps, bound, self.made_for)).encode()).hexdigest()[:12]

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of images that each member of the plan is asked about."""
        shares: dict[str, float] = {}
        left = 1.0
        for step in self.steps:
            shares |= dict.fromkeys(step.ask, max(0.0, left))
            left -= step.share
        return shares


class StepAnswers(NamedTuple):
    """The images that a step of a plan answers."""

    step: int  # from 0
    images: Steps  # their places among all, (K,)
    rows: Probabilities  # (K, C), the average of the members that were asked
    members: dict[str, Probabilities]  # (K, C) each


def in_steps(
    plan: PlanRecord,
    number_of_images: int,
    ask: Callable[[Names, Steps], Mapping[str, Probabilities]],
    weights: Mapping[str, float],
) -> Iterator[StepAnswers]:
    """Yield the answers of each step, whose members are asked about the images that go on.

    ``ask`` returns the rows (K, C) of some members for the images at K places. ``weights`` are the
    manifest's. The graph decides alike (:class:`app.graph.members.FastMembers`).
    """
    left, rows = np.arange(number_of_images), dict[str, Probabilities]()
    for number, step in enumerate(plan.steps):
        if not len(left):
            return
        rows |= ask(step.ask, left)
        mean = average(rows, weights, step.temperature)
        stops = np.ones(len(left), np.bool_)
        if step.stop_at is not None:
            stops = mean.max(axis=1) >= np.float32(step.stop_at)
        own = {name: of[stops] for name, of in rows.items()}
        yield StepAnswers(number, left[stops], mean[stops], own)
        left, rows = left[~stops], {name: of[~stops] for name, of in rows.items()}


def by_plan(
    plan: PlanRecord, members: Mapping[str, Probabilities], weights: Mapping[str, float]
) -> tuple[Probabilities, Steps]:
    """Return the rows (N, C) that a plan answers, and which step answers each image, (N,).

    ``members`` has rows (N, C) of each member, ``weights`` are the manifest's.
    """
    answers = np.empty_like(next(iter(members.values())))
    at = np.zeros(len(answers), np.int64)

    def ask(names: Names, places: Steps) -> dict[str, Probabilities]:
        return {name: members[name][places] for name in names}

    for step, images, rows, _ in in_steps(plan, len(answers), ask, weights):
        answers[images], at[images] = rows, step
    return answers, at


@dataclass(frozen=True, slots=True)
class Trust:
    """What an average's probabilities are worth."""

    temperature: float = 1.0
    sure_from: float | None = None  # the lowest probability of a sure answer's first class
    set_from: float | None = None  # the lowest of a class in the answer set, besides the first
    no_bound: str | None = None  # why there is no ``sure_from``, if the set has one in general


PLAIN = Trust()


class TrustTable:
    """The :class:`Trust` of each average of a set: of all members, of some, of the plan's steps.

    Reasons name the set by ``name``; ``members`` are in the manifest's order.
    """

    def __init__(
        self,
        name: str,
        members: tuple[str, ...],
        whole: AverageRecord,
        subsets: Iterable[SubsetRecord] = (),
        plan: PlanRecord | None = None,
    ) -> None:
        self._name, self._num_members = name, len(members)
        self.whole = _trust(whole, whole.answer_set)
        why = None if whole.sure is None else NO_BOUND
        self._subsets = {frozenset(s.members): _trust(s, s.answer_set, why) for s in subsets}
        self._steps: list[tuple[int, Trust]] = []  # how many members were asked by then
        num_asked = 0
        for step in plan.steps if plan else ():
            num_asked += len(step.ask)
            answer_set = plan.answer_set if plan else None
            self._steps.append((num_asked, _trust(step, answer_set, NO_BOUND)))

    def of(self, members: Mapping[str, object], step: int | None = None) -> Trust:
        """Return the trust of the average of ``members``, which is a step of the fast plan or not.

        ``step`` counts from 0. If members are missing, the bound is that of those that answered.
        """
        num = len(members)
        if step is None:
            if num == self._num_members:
                return self.whole
        elif step < len(self._steps) and self._steps[step][0] == num:
            return self._steps[step][1]
        if (known := self._subsets.get(frozenset(members))) is not None:
            return known
        if self.whole.sure_from is None:
            return PLAIN
        names = " and ".join(sorted(members))
        return Trust(no_bound=f"{self._name} has no measured bound for {names} alone")


def _trust(
    record: AverageRecord, answer_set: AnswerSetRecord | None, no_bound: str | None = None
) -> Trust:
    return Trust(
        record.temperature,
        record.sure.probability if record.sure else None,
        answer_set.probability if answer_set else None,
        None if record.sure else no_bound,
    )
