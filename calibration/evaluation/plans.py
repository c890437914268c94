"""Searches a set's fast plan: which members to ask first, and when their answer stands.

Candidates are every subset of the members by itself, cascades of two steps, and cascades of one,
two and all members. Temperatures are fitted on one part of the images, thresholds chosen on
another, and what was chosen is judged on the third (:mod:`calibration.evaluation.fitting`).

The choice is the cheapest candidate whose loss of top-1 is small in two ways, with one standard
error each. The observed loss stays within ``MAX_LOST``. The loss that all members' probabilities
expect stays within ``MAX_EXPECTED``: it varies less, since every image counts whose class changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from itertools import combinations, permutations

import numpy as np
import numpy.typing as npt

from calibration.evaluation.fitting import MIN_FITTED, Part, Rows, fit_temperature, with_bounds
from calibration.statistics import Paired, Rightness
from models.ensemble import Flags, PlanFigures, PlanRecord, StepRecord, tempered
from models.errors import ModelSetError
from models.ledger import MOST_IMAGES, DropOutcome, rounded_up
from models.machine import cpu_model
from models.manifest import Manifest
from models.record import Precision, wilson_interval

MAX_MEMBERS = 8
ALL_SUBSETS_UP_TO = 4  # members; of more, a first step has one or two
MAX_LOST = 0.005  # of top-1, a fraction
MAX_EXPECTED = 0.001
DEFAULT_TARGET = 0.95  # of right answers among sure ones, if the set has no bound
NUM_STOPS = 60  # thresholds that are tried at a step
MAX_MORE = 0.15  # of images that go on in a plan that is carried over
MAX_SHOWN = 8  # of the front
Places = npt.NDArray[np.int64]
Asks = tuple[tuple[str, ...], ...]  # the members of each step


@dataclass(frozen=True)
class Step:
    """A step of a candidate: its average, and the threshold from which on it answers."""

    ask: tuple[str, ...]
    members: tuple[str, ...]  # all that were asked by then
    temperature: float
    stop_at: float | None  # None: the last step


@dataclass(frozen=True)
class PlanScore:
    """A candidate's figures on the images for choosing and on those for judging."""

    steps: tuple[Step, ...]
    chosen: PlanFigures
    judged: PlanFigures
    shares: tuple[float, ...]  # of the judging images, answered at each step

    @property
    def name(self) -> str:
        """Its name in tables and plots."""
        first, *others = self.steps
        parts = [" + ".join(first.ask)]
        for before, step in zip(self.steps, others, strict=False):
            parts.append(f"{' + '.join(step.ask)} below {before.stop_at:.3f}")
        return ", then ".join(parts)

    @property
    def speed(self) -> float:
        """How many times less CPU than all members."""
        return self.judged.full_cpu_ms / self.judged.cpu_ms


@dataclass(frozen=True)
class PlanSearch:
    """The front of candidates, the cheapest first, the choice among them, and its record."""

    precision: Precision
    cpu_ms: Mapping[str, float]  # of each member
    scores: tuple[PlanScore, ...]
    best: PlanScore
    record: PlanRecord

    @property
    def outcome(self) -> DropOutcome:
        """Whether the interval of the loss, on the judging images, is within ``MAX_LOST``."""
        low, high = self.best.judged.lost_interval
        if high <= MAX_LOST:
            return "verified"
        return "refused" if low > MAX_LOST else "unknown"

    @property
    def num_more(self) -> int | None:
        """How many more images would tell, if loss and spread stay as they are; None: too many."""
        own = self.best.judged
        half = (own.lost_interval[1] - own.lost_interval[0]) / 2
        left = abs(MAX_LOST - own.lost)
        more = own.num_images * ((half / left) ** 2 - 1) if left else MOST_IMAGES
        return rounded_up(more) if 0 < more < MOST_IMAGES else None


def search(
    manifest: Manifest,
    rows: Rows,
    precision: Precision,
    cpu_ms: Mapping[str, float],
    dataset: str,
    images_sha256: str,
) -> PlanSearch:
    """Search the plan of a set by its members' rows and their costs in CPU-ms per image.

    Raises:
        ModelSetError: the set has one member or too many, there are too few images, or no candidate
            keeps the accuracy.
    """
    names = tuple(manifest.weights)
    if not 1 < len(names) <= MAX_MEMBERS:
        raise ModelSetError(
            f"--plan searches plans of 2 to {MAX_MEMBERS} members; {manifest.name} has "
            f"{len(names)} ({', '.join(names)}): leave it out"
        )
    rows.check("--plan")
    trial = _Trial(rows, cpu_ms)
    front, best = trial.front(names)
    if best is None:
        raise ModelSetError(
            f"--plan: no plan of {manifest.name} is cheaper than all members and keeps top-1 "
            f"within {MAX_LOST * 100:g} points on {int(rows.mask('choose').sum())} images; serve "
            "plan: full, or give more images"
        )
    score = trial.score(best)
    others = [trial.score(steps) for steps in front if steps != best]
    scores = sorted([score, *others], key=lambda each: each.judged.cpu_ms)
    record = _record(score, manifest, rows, dataset, images_sha256)
    return PlanSearch(precision, dict(cpu_ms), tuple(scores), score, record)


def _record(
    score: PlanScore, manifest: Manifest, rows: Rows, dataset: str, images_sha256: str
) -> PlanRecord:
    record = PlanRecord(
        steps=tuple(
            StepRecord(ask=s.ask, stop_at=s.stop_at, temperature=s.temperature, share=share)
            for s, share in zip(score.steps, score.shares, strict=True)
        ),
        precision=rows.precision,
        made_for=manifest.plan_key(rows.precision),
        dataset=dataset,
        images_sha256=images_sha256,
        measured=date.today(),
        cpu=cpu_model(),
        chosen=score.chosen,
        judged=score.judged,
    )
    target = manifest.sure.target if manifest.sure else DEFAULT_TARGET
    return with_bounds(record, rows, target)


def carried_over(plan: PlanSearch, before: Rows, manifest: Manifest, rows: Rows) -> PlanRecord:
    """Return a plan for other probabilities of the images that it was searched on, ``before``.

    Of the images that choose thresholds as many go on at each step, or the fewest more with which
    they lose no more top-1 than a choice may. ``manifest`` has the temperatures of ``rows``.
    """
    trial, chosen = _Trial(rows, plan.cpu_ms), rows.mask("choose")
    at = _Trial(before, plan.cpu_ms).step_of(plan.best.steps)
    go_on = [
        float((at > number)[chosen & (at >= number)].mean())
        for number in range(len(plan.best.steps))
    ]
    some = (
        trial.with_shares(plan.best.steps, [share + more for share in go_on])
        for more in np.linspace(0, MAX_MORE, NUM_STOPS)
    )
    steps = next(filter(trial.keeps_accuracy, some), trial.with_shares(plan.best.steps, go_on))
    record = plan.record
    return _record(trial.score(steps), manifest, rows, record.dataset, record.images_sha256)


def candidates(names: Sequence[str]) -> Iterator[Asks]:
    """Yield the members of each step, of every candidate.

    A first step of more than ``ALL_SUBSETS_UP_TO`` members has one or two, and leads to all.
    """
    whole, is_small = tuple(names), len(names) <= ALL_SUBSETS_UP_TO
    sizes = range(1, len(names)) if is_small else (1, 2)
    for first in (chosen for size in sizes for chosen in combinations(names, size)):
        yield (first,)
        rest = tuple(name for name in whole if name not in first)
        nums = range(1, len(rest) + 1) if is_small else (len(rest),)
        for then in (chosen for size in nums for chosen in combinations(rest, size)):
            yield (first, then)
    if len(names) > 2:
        for first_name, second in permutations(names, 2):
            rest = tuple(name for name in whole if name not in (first_name, second))
            yield ((first_name,), (second,), rest)


class _Trial:
    """Tries candidates on the rows of all images."""

    def __init__(self, rows: Rows, cpu_ms: Mapping[str, float]) -> None:
        self._rows, self._cpu_ms, self._truth = rows, cpu_ms, rows.truth
        self._masks: dict[Part, Flags] = {p: rows.mask(p) for p in ("fit", "choose", "judge")}
        self._every: Flags = np.ones(len(self._truth), np.bool_)
        # These repeat for many candidates.
        self._average, self._classes = cache(rows.of), cache(lambda n: rows.of(n).argmax(axis=1))
        self.likeliest = cache(lambda n, t: tempered(rows.of(n), t).max(axis=1))
        self._temperatures: dict[tuple[tuple[str, ...], bytes], float] = {}
        names = tuple(rows.weights)
        self._full = tempered(rows.of(names), self.temperature(names, self._every))
        self._full_right: Rightness = self._classes(names) == self._truth
        self._full_ms = sum(cpu_ms[name] for name in names)

    def front(self, names: Sequence[str]) -> tuple[list[tuple[Step, ...]], tuple[Step, ...] | None]:
        """Return the candidates that no other beats, by the images for choosing; and the choice."""
        tried: list[tuple[float, float, tuple[Step, ...]]] = []  # CPU-ms, loss
        best: tuple[float, tuple[Step, ...]] | None = None
        for asks in candidates(names):
            for steps in self._with_stops(asks, (), self._every):
                cpu_ms, lost, expected = self._cost_and_loss(steps)
                tried.append((cpu_ms, max(expected, lost), steps))
                is_good = lost <= MAX_LOST and expected <= MAX_EXPECTED and cpu_ms < self._full_ms
                if is_good and (best is None or cpu_ms < best[0]):
                    best = cpu_ms, steps
        front: list[tuple[Step, ...]] = []
        least = np.inf
        for _, loss, steps in sorted(tried, key=lambda each: each[:2]):
            if loss < least:
                least = loss
                front.append(steps)
        every = max(1, -(-len(front) // MAX_SHOWN))
        return front[::every], None if best is None else best[1]

    def _with_stops(
        self, asks: Asks, before: tuple[Step, ...], arrive: Flags
    ) -> Iterator[tuple[Step, ...]]:
        """Yield the candidate's steps with each combination of thresholds."""
        ask = asks[len(before)]
        names = (*(name for step in before for name in step.ask), *ask)
        temperature = self.temperature(names, arrive)
        if len(before) + 1 == len(asks):
            yield (*before, Step(ask, names, temperature, None))
            return
        likeliest = self.likeliest(names, temperature)
        values = likeliest[arrive & self._masks["choose"]]
        if not len(values):
            return
        for stop_at in np.unique(np.quantile(values, np.linspace(0, 0.9, NUM_STOPS)).round(3)):
            if 0 < stop_at < 1:
                step = Step(ask, names, temperature, float(stop_at))
                on = arrive & (likeliest < np.float32(stop_at))
                yield from self._with_stops(asks, (*before, step), on)

    def with_shares(self, before: Sequence[Step], shares: Sequence[float]) -> tuple[Step, ...]:
        """Return steps with other thresholds: a share of the choosing images goes on at each."""
        steps, arrive = list[Step](), self._every
        for step, share in zip(before, shares, strict=True):
            temperature, stop_at = self.temperature(step.members, arrive), None
            if step.stop_at is not None:
                likeliest = self.likeliest(step.members, temperature)
                values = likeliest[arrive & self._masks["choose"]]
                stop_at = round(float(np.quantile(values, min(share, 1.0))), 3)
                arrive = arrive & (likeliest < np.float32(stop_at))
            steps.append(Step(step.ask, step.members, temperature, stop_at))
        return tuple(steps)

    def keeps_accuracy(self, steps: tuple[Step, ...]) -> bool:
        """Whether the choosing images lose no more than a choice may, with one standard error."""
        _, lost, expected = self._cost_and_loss(steps)
        return lost <= MAX_LOST and expected <= MAX_EXPECTED

    def temperature(self, names: tuple[str, ...], arrive: Flags) -> float:
        """Fit the temperature of an average on the images that come to it, if they are enough."""
        if len(names) == 1 and arrive.all():
            return 1.0  # a member has its own already
        to_fit = self._masks["fit"]
        some = to_fit & arrive if int((to_fit & arrive).sum()) >= MIN_FITTED else to_fit
        key = names, some.tobytes()
        if key not in self._temperatures:
            rows = self._average(names)[some]
            weight = self._rows.wrong_weight
            self._temperatures[key] = fit_temperature(rows, self._truth[some], weight)
        return self._temperatures[key]

    def step_of(self, steps: tuple[Step, ...]) -> Places:
        """Return which step answers each image, (N,)."""
        at, left = np.full(len(self._truth), len(steps) - 1), self._every
        for number, step in enumerate(steps[:-1]):
            goes_on = self.likeliest(step.members, step.temperature) < np.float32(step.stop_at or 1)
            at[left & ~goes_on] = number
            left = left & goes_on
        return at

    def _class_of(self, steps: tuple[Step, ...], at: Places) -> Places:
        """Return the likeliest class of each image, (N,), by the step that answers it."""
        return np.choose(at, [self._classes(step.members) for step in steps])

    def _cost_and_loss(self, steps: tuple[Step, ...]) -> tuple[float, float, float]:
        """Return CPU-ms, the observed and the expected loss, each with one standard error."""
        choose, at = self._masks["choose"], self.step_of(steps)
        likeliest = self._class_of(steps, at)
        lost = self._full_right[choose].astype(np.int64) - (likeliest == self._truth)[choose]
        of_full = self._full[np.arange(len(at)), likeliest]
        expected = (self._full.max(axis=1) - of_full)[choose]
        root = np.sqrt(len(lost))
        high, high_expected = (each.mean() + each.std() / root for each in (lost, expected))
        return self._ms(steps, at[choose]), float(high), float(high_expected)

    def _ms(self, steps: tuple[Step, ...], at: Places) -> float:
        return sum(
            float((at >= number).mean()) * sum(self._cpu_ms[name] for name in step.ask)
            for number, step in enumerate(steps)
        )

    def score(self, steps: tuple[Step, ...]) -> PlanScore:
        """Return a candidate's figures."""
        at = self.step_of(steps)
        right: Rightness = self._class_of(steps, at) == self._truth
        judge = self._masks["judge"]
        return PlanScore(
            steps,
            self._figures(steps, at, right, self._masks["choose"]),
            self._figures(steps, at, right, judge),
            tuple(round(float((at[judge] == n).mean()), 4) for n in range(len(steps))),
        )

    def _figures(
        self, steps: tuple[Step, ...], at: Places, right: Rightness, part: Flags
    ) -> PlanFigures:
        right, full = right[part], self._full_right[part]
        pair = Paired.of(full, right)
        low, high = wilson_interval(int(right.sum()), len(right))
        return PlanFigures(
            num_images=len(right),
            top1=round(float(right.mean()), 4),
            top1_interval=(round(low, 4), round(high, 4)),
            full_top1=round(float(full.mean()), 4),
            lost=round(pair.difference, 6),
            lost_interval=(round(pair.interval[0], 4), round(pair.interval[1], 4)),
            p_value=round(pair.p_value, 4),
            cpu_ms=round(self._ms(steps, at[part]), 3),
            full_cpu_ms=round(self._full_ms, 3),
        )
