"""Fits what a set says of its confidence: temperatures, the bounds of sure answers, answer sets.

A hash of each image's file decides its part, so copies of an image are in the same one.
Temperatures are fitted to the first part, bounds are chosen on the second, and both are judged on
the third, half of the images. So the reported figures are unbiased, and no photograph is in two
parts.

A temperature divides the logits (Guo et al., 2017): it changes a classifier's confidence, not its
classes. The bound of sure answers is the lowest probability of the first class above which at least
the requested share is right, by the lower end of the 95 % interval. Of foreign images, which show
none of the classes, it leaves at most ``MAX_FOREIGN`` sure. Half of these choose, the others judge.
Answer sets are split conformal prediction sets (Vovk et al., 2005; Angelopoulos and Bates, 2023),
to which the first class always belongs.

Networks are right more often on images that they learned from. ``Rows.wrong_weight`` makes up for
it: each wrong answer counts this many times, in the likelihood and among sure answers.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from math import ceil, exp, log, sqrt
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from calibration.datasets import LabelledImage, truth_of
from calibration.evaluation.inference import AnsweredBatch
from calibration.statistics import Reliability
from models.ensemble import (
    AnswerSetRecord,
    AverageRecord,
    Flags,
    ForeignRecord,
    PlanRecord,
    Probabilities,
    SubsetRecord,
    SureRecord,
    average,
    by_plan,
    tempered,
)
from models.errors import ModelSetError
from models.manifest import ENSEMBLE, Manifest
from models.record import Precision, sha256_of, wilson_interval

Part = Literal["fit", "choose", "judge"]
MIN_IMAGES = 100  # in each part
MIN_FITTED, MIN_SURE = 50, 50  # images that a step's temperature, or a bound, needs
NUM_BOUNDS = 1000  # a bound has three decimals
LOWEST, HIGHEST = 0.2, 20.0  # as in manifests
NUM_SECTIONS = 40  # of the golden section, each of which leaves 0.62 of the interval
FLOOR = 1e-30  # bounds a probability before its logarithm
COVERAGE = 0.95  # of answer sets
MAX_FOREIGN = 0.05  # of sure answers among foreign images
NEVER = 1.0  # a bound that no answer reaches
MAX_VALUES = 2**28  # float32 of all rows that are kept: 1 GiB
Classes = npt.NDArray[np.int64]


def part_of(path: Path) -> Part:
    """Return an image's part: a quarter fits, a quarter chooses, a half judges."""
    try:
        digest = sha256_of(path)
    except ModelSetError:  # unreadable, which is listed later
        digest = hashlib.sha256(str(path).encode("utf-8", "replace")).hexdigest()
    number = int(digest[:8], 16)
    if number % 2:
        return "judge"
    return "choose" if number // 2 % 2 else "fit"


class Rows:
    """Collects the members' rows of every image, with its class and part.

    Args:
        manifest: the set's.
        precision: of the networks.
        dataset: the images' name.
        wrong_weight: how often each wrong answer counts.
        foreign: rows of images of other classes, if they choose bounds too.
    """

    def __init__(
        self,
        manifest: Manifest,
        precision: Precision,
        dataset: str = "",
        wrong_weight: float = 1.0,
        foreign: "Rows | None" = None,
    ) -> None:
        self.weights, self.precision = manifest.weights, precision
        self.dataset, self.wrong_weight, self.foreign = dataset, wrong_weight, foreign
        self._batches: list[tuple[list[Part], Classes, dict[str, Probabilities]]] = []
        self._num_values = 0
        self._lock = threading.Lock()  # batches come from several threads

    def add(self, batch: AnsweredBatch[LabelledImage]) -> None:
        """Keep a batch's rows: 4 bytes per class, member and image."""
        if not batch.images:
            return
        parts = [part_of(image.path) for image in batch.images]
        rows = batch.probabilities[self.precision]
        members = {name: rows[name] for name in self.weights}
        with self._lock:
            self._batches.append((parts, truth_of(batch.images), members))
            self._num_values += sum(own.size for own in members.values())
            if self._num_values > MAX_VALUES:
                number = sum(len(kept[0]) for kept in self._batches)
                raise ModelSetError(
                    f"the answers to {number} images take {4 * self._num_values / 2**30:.1f} GiB "
                    f"of memory, the limit is 1: give --max-images {number - len(parts)} or fewer"
                )

    def with_temperatures(self, temperatures: Mapping[str, float], wrong_weight: float) -> "Rows":
        """Return the same images with members' rows at these temperatures, where there are any."""
        made = Rows.__new__(Rows)
        made.__dict__ |= {k: v for k, v in self.__dict__.items() if k not in ("truth", "members")}
        made.wrong_weight = wrong_weight
        made._batches = [
            (parts, truth, {n: tempered(of, temperatures.get(n, 1.0)) for n, of in rows.items()})
            for parts, truth, rows in self._batches
        ]
        return made

    def check(self, option: str) -> None:
        """Raise :class:`ModelSetError` if a part has too few images."""
        nums = {part: int(self.mask(part).sum()) for part in ("fit", "choose", "judge")}
        if min(nums.values()) < MIN_IMAGES:
            have = ", ".join(f"{num} to {part}" for part, num in nums.items())
            raise ModelSetError(
                f"{option} has {have}: a quarter of the images fits, a quarter chooses, a half "
                f"judges; give at least {MIN_IMAGES} of each, about {5 * MIN_IMAGES} images"
            )
        if self.foreign is not None and len(self.foreign.truth) < 2 * MIN_IMAGES:
            raise ModelSetError(
                f"--foreign has {len(self.foreign.truth)} images: a half chooses, the other "
                f"judges; give at least {2 * MIN_IMAGES}"
            )

    @cached_property
    def truth(self) -> Classes:
        """The class of each image, (N,)."""
        return np.concatenate([batch[1] for batch in self._batches] or [np.zeros(0, np.int64)])

    @cached_property
    def members(self) -> dict[str, Probabilities]:
        """Each member's rows, (N, C)."""
        return {
            name: np.concatenate([batch[2][name] for batch in self._batches])
            for name in self.weights
        }

    def mask(self, part: Part) -> Flags:
        """Return which images are in a part, (N,)."""
        return np.array([own == part for batch in self._batches for own in batch[0]], np.bool_)

    def of(self, names: Sequence[str], temperature: float = 1.0) -> Probabilities:
        """Return the average of some members, (N, C)."""
        return average({name: self.members[name] for name in names}, self.weights, temperature)


def fit_temperature(rows: Probabilities, truth: Classes, wrong_weight: float = 1.0) -> float:
    """Return the temperature with the highest likelihood of (N,) classes by (N, C) probabilities.

    The likelihood is concave in the inverse temperature, so a golden section search finds its
    maximum. An image whose first class is wrong counts ``wrong_weight`` times.
    """
    logits = np.log(np.maximum(rows, FLOOR))
    weights = np.where(rows.argmax(axis=1) == truth, 1.0, wrong_weight)

    def loss(log_temperature: float) -> float:
        scaled = logits / exp(log_temperature)
        most = scaled.max(axis=1, keepdims=True)
        total = np.log(np.exp(scaled - most).sum(axis=1)) + most[:, 0]
        return float(np.average(total - scaled[np.arange(len(truth)), truth], weights=weights))

    low, high, share = log(LOWEST), log(HIGHEST), (sqrt(5) - 1) / 2
    left, right = high - share * (high - low), low + share * (high - low)
    of_left, of_right = loss(left), loss(right)
    for _ in range(NUM_SECTIONS):
        if of_left <= of_right:  # if all are right, any low temperature is optimal
            high, right, of_right = right, left, of_left
            left = high - share * (high - low)
            of_left = loss(left)
        else:
            low, left, of_left = left, right, of_right
            right = low + share * (high - low)
            of_right = loss(right)
    return round(exp((low + high) / 2), 4)


class Answers(NamedTuple):
    """An average's rows (N, C) of images with their classes (N,), and of foreign images (F, C)."""

    rows: Probabilities
    truth: Classes
    foreign: Probabilities | None = None

    def of(self, own: Flags, foreign: Flags | None) -> "Answers":
        """Return those of some images, and of some foreign ones."""
        others = None if self.foreign is None else self.foreign[foreign]
        return Answers(self.rows[own], self.truth[own], others)


def choose_bound(answers: Answers, target: float, wrong_weight: float = 1.0) -> float | None:
    """Return the lowest bound that shows ``target`` right answers; None: none does.

    By the lower end of the 95 % interval, of at least ``MIN_SURE`` sure images. At most
    ``MAX_FOREIGN`` of foreign images reach it.
    """
    num_sure = _at_least(answers.rows)
    right = _at_least(answers.rows[answers.rows.argmax(axis=1) == answers.truth])
    is_good = num_sure >= MIN_SURE
    if answers.foreign is not None:
        is_good &= _at_least(answers.foreign) <= MAX_FOREIGN * len(answers.foreign)
    for step in np.flatnonzero(is_good).tolist():
        num, share = int(num_sure[step]), _share(right[step], num_sure[step], wrong_weight)
        if wilson_interval(share * num, num)[0] >= target:
            return step / NUM_BOUNDS
    return None


def _at_least(rows: Probabilities) -> Classes:
    """Return how many rows (N, C) reach each bound with their first class."""
    edges = np.arange(NUM_BOUNDS, dtype=np.float32) / np.float32(NUM_BOUNDS)
    steps = np.searchsorted(edges, rows.max(axis=1), side="right") - 1
    return np.bincount(steps, minlength=NUM_BOUNDS)[::-1].cumsum()[::-1]


def _share(num_right: int, number: int, wrong_weight: float) -> float:
    """Return the share of right answers where a wrong one counts ``wrong_weight`` times."""
    return num_right / (num_right + wrong_weight * (number - num_right))


def judged_bound(bound: float, answers: Answers, target: float, rows: Rows) -> SureRecord | None:
    """Return the record of a bound on other images of ``rows``; None without any."""
    own, truth, foreign = answers
    if not len(truth):
        return None
    is_sure = own.max(axis=1) >= np.float32(bound)
    num_right, num_sure = int((own.argmax(axis=1) == truth)[is_sure].sum()), int(is_sure.sum())
    right = _share(num_right, num_sure, rows.wrong_weight) if num_sure else None
    low, high = (0.0, 1.0) if right is None else wilson_interval(right * num_sure, num_sure)
    others = None
    if rows.foreign is not None and foreign is not None and len(foreign):
        is_foreign_sure = (foreign.max(axis=1) >= np.float32(bound)).tolist()
        others = foreign_record(is_foreign_sure, rows.foreign.dataset)
    return SureRecord(
        probability=bound,
        target=target,
        num_images=len(truth),
        share=round(num_sure / len(truth), 4),
        right=None if right is None else round(right, 4),
        right_interval=(round(low, 4), round(high, 4)),
        measured_on=rows.dataset or None,
        wrong_weight=rows.wrong_weight,
        foreign=others,
    )


def foreign_record(is_sure: Sequence[bool], dataset: str) -> ForeignRecord:
    """Return how many answers to foreign images are sure."""
    number, num_sure = len(is_sure), sum(is_sure)
    low, high = wilson_interval(num_sure, number)
    interval = round(low, 4), round(high, 4)
    share = round(num_sure / number, 4)
    return ForeignRecord(dataset=dataset, num_images=number, share=share, interval=interval)


def answer_set_bound(rows: Probabilities, truth: Classes) -> float:
    """Return the probability from which on a class belongs to the answer set.

    Of rows (N, C): the split conformal quantile of the right class's probability, where a right
    first class counts as held at any bound.
    """
    of_truth = rows[np.arange(len(truth)), truth].astype(np.float64)
    of_truth[rows.argmax(axis=1) == truth] = 1.0
    num_missed = len(truth) - ceil((len(truth) + 1) * COVERAGE)  # that may be below the bound
    bound = np.sort(of_truth)[num_missed] if num_missed >= 0 else 0.0
    return float(np.floor(bound * 1e5) / 1e5)


def judged_set(bound: float, rows: Probabilities, truth: Classes) -> AnswerSetRecord:
    """Return the record of answer sets on other images, (N, C) and (N,)."""
    is_in = in_answer_set(rows, bound)
    return AnswerSetRecord(
        probability=bound,
        target=COVERAGE,
        num_images=len(truth),
        coverage=round(float(is_in[np.arange(len(truth)), truth].mean()), 4),
        mean_size=round(float(is_in.sum(axis=1).mean()), 3),
    )


def in_answer_set(rows: Probabilities, bound: float) -> Flags:
    """Return which classes of (N, C) are in the answer sets."""
    is_in: Flags = rows >= np.float32(bound)
    is_in[np.arange(len(rows)), rows.argmax(axis=1)] = True
    return is_in


def fit_average(
    rows: Rows, names: Sequence[str], target: float, temperature: float | None
) -> AverageRecord:
    """Return the :class:`AverageRecord` of some members; ``temperature`` None: fitted."""
    plain, truth = rows.of(names), rows.truth
    if temperature is None:
        to_fit = rows.mask("fit")
        temperature = fit_temperature(plain[to_fit], truth[to_fit], rows.wrong_weight)
    foreign = None if rows.foreign is None else rows.foreign.of(names, temperature)
    answers = Answers(tempered(plain, temperature), truth, foreign)
    choose, judge = _parts(rows, answers)
    return AverageRecord(
        temperature=temperature,
        sure=_bound(rows, choose, judge, target),
        answer_set=_answer_set(choose, judge),
    )


def _parts(
    rows: Rows, answers: Answers, own: Flags | bool = True, foreign: Flags | bool = True
) -> tuple[Answers, Answers]:
    """Return the answers that choose bounds and those that judge them, of all images or some."""
    judges = None if rows.foreign is None else rows.foreign.mask("judge")
    return (
        answers.of(rows.mask("choose") & own, None if judges is None else ~judges & foreign),
        answers.of(rows.mask("judge") & own, None if judges is None else judges & foreign),
    )


def _bound(rows: Rows, choose: Answers, judge: Answers, target: float) -> SureRecord | None:
    bound = choose_bound(choose, target, rows.wrong_weight)
    return None if bound is None else judged_bound(bound, judge, target, rows)


def _answer_set(choose: Answers, judge: Answers) -> AnswerSetRecord:
    return judged_set(answer_set_bound(choose.rows, choose.truth), judge.rows, judge.truth)


def with_bounds(plan: PlanRecord, rows: Rows, target: float) -> PlanRecord:
    """Return a plan with a bound for the answers of each of its steps, and one of answer sets.

    A step with too few answers takes the bound of all the plan's answers. Without one either no
    answer of it is sure. Foreign images choose that of all answers, and no step's is lower.
    """
    foreign, other = rows.foreign, None
    own, at = by_plan(plan, rows.members, rows.weights)
    other_at = np.zeros(0, np.int64)
    if foreign is not None:
        other, other_at = by_plan(plan, foreign.members, rows.weights)
    answers = Answers(own, rows.truth, other)
    choose, judge = _parts(rows, answers)
    of_all = choose_bound(choose, target, rows.wrong_weight)
    of_all = NEVER if of_all is None else of_all
    judge_at, steps = at[rows.mask("judge")], []
    for number, step in enumerate(plan.steps):
        chosen, judged = _parts(rows, answers, at == number, other_at == number)
        bound = choose_bound(chosen._replace(foreign=None), target, rows.wrong_weight)
        bound = of_all if bound is None else bound if other is None else max(bound, of_all)
        sure = judged_bound(bound, judged, target, rows)
        share = round(float((judge_at == number).mean()), 4)
        steps.append(step.model_copy(update={"sure": sure, "share": share}))
    update = {"steps": tuple(steps), "answer_set": _answer_set(choose, judge)}
    return plan.model_copy(update=update)


def fit_trust(manifest: Manifest, rows: Rows, target: float) -> Manifest:
    """Return the manifest with bounds for all members, each subset of them, and the fast plan.

    A set of more than four members gets those of all but one member, and of each alone.

    Raises:
        ModelSetError: no bound of all members reaches the target, or there are too few images.
    """
    rows.check("--sure-at")
    names = tuple(manifest.weights)
    whole = fit_average(rows, names, target, manifest.temperature)
    if whole.sure is None:
        num = int(rows.mask("choose").sum())
        foreign = "" if rows.foreign is None else f", with {MAX_FOREIGN:.0%} of --foreign's at most"
        raise ModelSetError(
            f"--sure-at {target:g}: no probability leaves {MIN_SURE} of {num} images that show it"
            f"{foreign}; give more images, or ask for less"
        )
    sizes = range(1, len(names)) if len(names) <= 4 else sorted({1, len(names) - 1})
    trust = []
    for subset in (chosen for size in sizes for chosen in combinations(names, size)):
        temperature = 1.0 if len(subset) == 1 else None  # a member has its own already
        record = fit_average(rows, subset, target, temperature)
        trust.append(SubsetRecord(members=subset, **dict(record)))
    update: dict[str, object] = {"sure": whole.sure, "trust": tuple(trust)}
    update["answer_set"] = whole.answer_set
    if (plan := manifest.usable_plan(rows.precision)) is not None:
        update["fast_plan"] = with_bounds(plan, rows, target)
    return manifest.model_copy(update=update)


@dataclass(frozen=True)
class Judged:
    """The calibration of a classifier on images that were not used for fitting."""

    top1: float
    calibration_error: float
    log_likelihood: float  # mean, in nats

    @classmethod
    def of(cls, rows: Probabilities, truth: Classes) -> "Judged":
        """Judge float32 (N, C) against (N,) classes."""
        right, reliability = rows.argmax(1) == truth, Reliability()
        reliability.add(rows.max(axis=1), right)
        nats = float(np.log(np.maximum(rows[np.arange(len(truth)), truth], FLOOR)).mean())
        return cls(float(right.mean()), reliability.expected_calibration_error, nats)


@dataclass(frozen=True)
class Fitted:
    """Temperatures by member and ``ensemble``, and their effect on images not used for fitting."""

    temperatures: Mapping[str, float]
    num_fitted: int
    num_judged: int
    before: Mapping[str, Judged]
    after: Mapping[str, Judged]


def fit_temperatures(rows: Rows) -> Fitted:
    """Fit temperatures of a set that has none, and judge them on other images.

    Each member gets one, then their average, which may give other classes when its members'
    confidence changes.

    Raises:
        ModelSetError: there are too few images.
    """
    rows.check("--calibrate")
    to_fit, judge, truth = rows.mask("fit"), rows.mask("judge"), rows.truth
    fit = partial(fit_temperature, truth=truth[to_fit], wrong_weight=rows.wrong_weight)
    fitted = {name: fit(of[to_fit]) for name, of in rows.members.items()}
    after = {name: tempered(of, fitted[name]) for name, of in rows.members.items()}
    mean = average(after, rows.weights)
    fitted[ENSEMBLE] = fit(mean[to_fit])
    before = rows.members | {ENSEMBLE: average(rows.members, rows.weights)}
    after |= {ENSEMBLE: tempered(mean, fitted[ENSEMBLE])}
    return Fitted(
        fitted,
        int(to_fit.sum()),
        int(judge.sum()),
        {name: Judged.of(of[judge], truth[judge]) for name, of in before.items()},
        {name: Judged.of(of[judge], truth[judge]) for name, of in after.items()},
    )


def with_temperatures(manifest: Manifest, temperatures: Mapping[str, float]) -> Manifest:
    """Return the manifest with these temperatures, by member and ``ensemble``.

    It removes the bounds and the fast plan, which were measured with other probabilities.
    """
    members = tuple(
        member.model_copy(update={"temperature": temperatures[member.name]})
        for member in manifest.members
    )
    update = {"members": members, "temperature": temperatures[ENSEMBLE], "sure": None}
    update |= {"answer_set": None, "trust": (), "fast_plan": None}
    return manifest.model_copy(update=update)
