"""Compares two sets of answers, to show whether the photos that a service sees have changed.

Answers are read from samples of a service (``sample_dir``), or from the files of ``tandem
classify``. Three tests compare classes, confidence and the members' agreement. A difference is
drift if it is statistically significant and its effect size reaches a bound. With many images the
smallest difference is significant; with few, large ones arise by chance.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import asin, sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2_contingency, false_discovery_control, fisher_exact, ks_2samp

from calibration.answer_files import OPTIONS_KEY, VERSION_KEY, Row
from models.errors import ModelSetError
from models.machine import needs_extra

DISAGREES = "disagrees"  # the key in samples on which versions of a set disagree
NO_LABEL = "(no label)"  # a multi-label answer without any label
LEVEL = 0.05  # false discovery rate of the three tests (Benjamini and Hochberg 1995)
MIN_IMAGES = 50  # on each side: with fewer, only extreme differences are significant
MIN_EXPECTED = 5.0  # images of a class on either side, for the chi-squared test (Cochran 1954)
NUM_DRAWN = 1999  # random divisions, in place of that test where a class has fewer images
MAX_SQUARE = 4.0  # the distance of :func:`_square` between sides that share no class
# Cohen's (1988) bounds of a small effect; Kolmogorov and Smirnov's D has none, 0.1 is our choice.
BOUNDS = {"classes": 0.1, "confidence": 0.1, "agreement": 0.2}


@dataclass(frozen=True)
class Answers:
    """The answers of N images."""

    labels: tuple[str, ...]  # (N,), the first label of each answer
    confidence: npt.NDArray[np.float64]  # (N,), that label's probability
    agreement: npt.NDArray[np.bool_]  # (N,), whether all members agreed
    versions: dict[str, int]  # number of images by the version that answered
    first: datetime | None = None  # time of the first answer; None if no time is recorded
    last: datetime | None = None
    model_set: str | None = None  # None if no set is recorded
    plans: dict[str, int] = field(default_factory=dict)  # images by the plan: full, fast

    @property
    def num(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "Answers":
        """Collect rows that have the fields of ``/v1/classify``; rows with an error are skipped."""
        labels, confidence, agreement = list[str](), list[float](), list[bool]()
        versions, plans, times = Counter[str](), Counter[str](), list[datetime]()
        for row in rows:
            if row.get("error") is not None:
                continue
            label, probability = _first(row)
            labels.append(label)
            confidence.append(probability)
            agreement.append(row["agreement"])
            versions[str(row.get("model_version") or "unknown")] += 1
            plans[plan_of(row)] += 1
            if (when := time_of(row)) is not None:
                times.append(when)
        return cls(
            tuple(labels),
            np.array(confidence, np.float64),
            np.array(agreement, np.bool_),
            dict(versions),
            min(times, default=None),
            max(times, default=None),
            plans=dict(plans),
        )


@dataclass(frozen=True)
class Difference:
    """The result of one test.

    ``effect`` is the effect size, which does not grow with the number of images. From ``bound`` on
    it matters.
    """

    name: str
    test: str
    statistic: float
    p_value: float  # of this test alone, before the adjustment for three tests
    effect_name: str
    effect: float
    bound: float
    reference: float | None  # the mean or share on this side; None for the test of classes
    samples: float | None
    adjusted_p: float = 1.0

    @property
    def is_drift(self) -> bool:
        return self.adjusted_p < LEVEL and self.effect >= self.bound


@dataclass(frozen=True)
class ClassShare:
    """How many images of a class each side has, and their shares, 0..1."""

    label: str
    num_reference: int
    num_samples: int
    reference: float
    samples: float

    @property
    def change(self) -> float:
        return self.samples - self.reference


@dataclass(frozen=True)
class Drift:
    """How samples differ from the reference."""

    reference: Answers
    samples: Answers
    differences: tuple[Difference, ...]
    classes: tuple[ClassShare, ...]  # all labels on either side, the largest change first

    @property
    def sides(self) -> dict[str, Answers]:
        return {"reference": self.reference, "samples": self.samples}

    @property
    def is_drift(self) -> bool:
        return any(difference.is_drift for difference in self.differences)


def compare(reference: Answers, samples: Answers) -> Drift:
    """Test samples against the reference.

    Raises:
        ModelSetError: either has fewer than 50 images, or they are of different model sets.
    """
    names = [answers.model_set for answers in (reference, samples) if answers.model_set is not None]
    if len(set(names)) > 1:
        raise ModelSetError(
            f"the reference has answers of {names[0]}, and the samples of {names[1]}: choose with "
            f"--model-set, or make a reference: tandem classify-offline --model-set {names[1]}"
        )
    for side, answers in (("the reference", reference), ("samples", samples)):
        if answers.num < MIN_IMAGES:
            raise ModelSetError(
                f"{side}: {answers.num} answers, and the tests need at least {MIN_IMAGES}; "
                "collect more, or raise sample_ratio"
            )
    shares = class_shares(reference.labels, samples.labels)
    counts = np.array([(share.num_reference, share.num_samples) for share in shares]).T
    tests = _classes(counts), _confidence(reference, samples), _agreement(reference, samples)
    adjusted = zip(tests, false_discovery_control([test.p_value for test in tests]), strict=True)
    differences = tuple(replace(test, adjusted_p=float(p)) for test, p in adjusted)
    return Drift(reference, samples, differences, shares)


def class_shares(reference: tuple[str, ...], samples: tuple[str, ...]) -> tuple[ClassShare, ...]:
    """Return the share of each label on either side, the largest change first."""
    before, now = Counter(reference), Counter(samples)

    def share_of(label: str) -> ClassShare:
        first, second = before[label], now[label]
        return ClassShare(label, first, second, first / len(reference), second / len(samples))

    shares = map(share_of, before.keys() | now.keys())
    return tuple(sorted(shares, key=lambda share: (-abs(share.change), share.label)))


def _classes(counts: npt.NDArray[np.int64]) -> Difference:
    """Test the numbers of images by side and class, (2, C), with chi-squared.

    If a class is too rare for that test, the p-value comes from random divisions of the images.
    """
    bound, expected = BOUNDS["classes"], _expected(counts)
    if expected.min() < MIN_EXPECTED:
        test, (p_value, by_chance) = "chi-squared (Monte Carlo)", _by_chance(counts)
    else:
        test, p_value = "chi-squared", float(chi2_contingency(counts, correction=False).pvalue)
        by_chance = (counts.shape[1] - 1) * float((1 / counts.sum(axis=1)).sum())
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # Cramér's V, 0..1. Its bias is subtracted first: by_chance is the mean distance between sides
    # without a difference (Bergsma 2013, Journal of the Korean Statistical Society 42).
    most, over = MAX_SQUARE - by_chance, float(_square(counts[1], counts)) - by_chance
    effect = sqrt(min(1.0, max(0.0, over) / most)) if most > 0 else 0.0
    return Difference("classes", test, statistic, p_value, "Cramér's V", effect, bound, None, None)


def _expected(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the expected images by side and class, (2, C), if both sides had the same shares."""
    return np.asarray(np.outer(counts.sum(axis=1), counts.sum(axis=0)) / counts.sum())


def _by_chance(counts: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Divide the images at random ``NUM_DRAWN`` times.

    Returns the p-value of the chi-squared statistic, and the mean of :func:`_square`.
    """
    total = counts.sum(axis=0)
    expected = _expected(counts)
    drawn = np.random.default_rng(0).multivariate_hypergeometric(
        total, int(counts[1].sum()), size=NUM_DRAWN
    )  # (NUM_DRAWN, C), images on the second side

    def statistic(second: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return np.asarray((second - expected[1]) ** 2 @ (1 / expected).sum(axis=0))

    as_far = statistic(drawn) >= statistic(counts[1]) * (1 - 1e-9)
    return (1 + int(as_far.sum())) / (NUM_DRAWN + 1), float(_square(drawn, counts).mean())


def _square(
    second: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the chi-squared distance of the two sides' class shares, 0..4.

    It does not depend on the sides' sizes. ``second`` is the images of each class on the second
    side, (..., C); the rest of ``counts``, (2, C), is on the first.
    """
    num_first, num_second = counts.sum(axis=1)
    shares, others = second / num_second, (counts.sum(axis=0) - second) / num_first
    return np.asarray((2 * (others - shares) ** 2 / (others + shares)).sum(axis=-1))


def _confidence(reference: Answers, samples: Answers) -> Difference:
    """Test the first class's probability with the two-sample Kolmogorov-Smirnov test."""
    result = ks_2samp(reference.confidence, samples.confidence)
    means = (float(answers.confidence.mean()) for answers in (reference, samples))
    p_value, distance = float(result.pvalue), float(result.statistic)
    test, bound = "Kolmogorov-Smirnov", BOUNDS["confidence"]
    return Difference("confidence", test, distance, p_value, "D", distance, bound, *means)


def _agreement(reference: Answers, samples: Answers) -> Difference:
    """Test the share of images on which all members agree with Fisher's exact test."""
    agreed = [(int(answers.agreement.sum()), answers.num) for answers in (reference, samples)]
    p_value = float(fisher_exact([[count, num - count] for count, num in agreed]).pvalue)
    shares = [count / num for count, num in agreed]
    first, second = (2 * asin(sqrt(share)) for share in shares)
    test, more, bound = "Fisher's exact", shares[1] - shares[0], BOUNDS["agreement"]
    effect = abs(second - first)
    return Difference("agreement", test, more, p_value, "Cohen's h", effect, bound, *shares)


@dataclass(frozen=True)
class Wanted:
    """A filter of rows; None in a field admits every row."""

    model_set: str | None = None
    version: str | None = None
    plan: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def takes(self, row: Row) -> bool:
        """Whether a row passes; a row without a set, version or time passes the filter of it."""
        when = time_of(row)
        return (
            self.model_set in (None, row.get("model_set", self.model_set))
            and self.version in (None, row.get("model_version", self.version))
            and self.plan in (None, plan_of(row))
            and (self.since is None or when is None or when >= self.since)
            and (self.until is None or when is None or when < self.until)
        )


def read_answers(path: Path, wanted: Wanted) -> Answers:
    """Read the answers of a JSON Lines or Parquet file, or of a folder of samples.

    Raises:
        ModelSetError: it cannot be read as answers, or has answers of several model sets.
    """
    names, rows = set[str](), list[Row]()
    try:
        for row in _rows(path):
            if row.get("error") is None and wanted.takes(row):
                names |= {str(row["model_set"])} if "model_set" in row else set()
                rows.append(row)
        answers = replace(Answers.of(rows), model_set=next(iter(names), None))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelSetError(
            f"{path}: a row is not an answer of tandem: {error}; remove the row, or write the file "
            "again with tandem classify-offline"
        ) from error
    if len(names) > 1:
        raise ModelSetError(
            f"{path} has answers of {', '.join(sorted(names))}: choose one with --model-set"
        )
    return answers


def _rows(path: Path) -> Iterator[Row]:
    if not path.exists():
        raise ModelSetError(f"{path}: no such file or folder")
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        elif path.is_dir():
            yield from _samples(path)
        else:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    yield _parsed(line, f"{path}, line {number}")
    except OSError as error:
        raise ModelSetError(f"{path}: {error.strerror or error}") from error


def _samples(folder: Path) -> Iterator[Row]:
    """Yield the answers in a folder of samples, without those that are removed meanwhile."""
    if not (paths := sorted(folder.rglob("*.json"))):
        raise ModelSetError(
            f"{folder} has no samples. If it is a folder of images, run tandem classify-offline "
            f"{folder} --out answers.jsonl, and give answers.jsonl"
        )
    for path in paths:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        row = _parsed(content, str(path))
        if DISAGREES not in row:  # those were chosen for what they are
            yield row


def _parsed(text: bytes, place: str) -> Row:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ModelSetError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict) or not ({"predictions", "error"} & row.keys()):
        raise ModelSetError(f"{place}: not an answer of tandem: it has no predictions")
    return row


def _parquet_rows(path: Path) -> Iterator[Row]:
    with needs_extra("parquet", "drift --reference FILE.parquet"):
        import pyarrow.parquet
    columns = ["predictions", "agreement", "error"]
    parts = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    for part in parts:
        try:
            table = pyarrow.parquet.read_table(part, columns=columns)
        except (ValueError, KeyError) as error:  # the base classes of Arrow's errors
            raise ModelSetError(f"{part}: not answers of tandem: {error}") from error
        said = table.schema.metadata or {}
        version = said.get(VERSION_KEY, b"unknown").decode()
        plan = json.loads(said.get(OPTIONS_KEY, b"{}")).get("plan", "full")
        for row in table.to_pylist():
            yield {**row, "model_version": version, "plan": plan}


def _first(row: Row) -> tuple[str, float]:
    first: Row = next(iter(row["predictions"] or ()), {"label": NO_LABEL, "probability": 0.0})
    label, probability = first["label"], first["probability"]
    if not isinstance(label, str):
        raise ValueError(f"label is {label!r}, not a string")
    if not isinstance(probability, int | float) or not 0 <= probability <= 1:
        raise ValueError(f"probability is {probability!r}, not a number from 0 to 1")
    return label, float(probability)


def plan_of(row: Row) -> str:
    """Return the plan that answered a row; rows from before there were plans are full."""
    return str(row.get("plan") or "full")


def time_of(row: Row) -> datetime | None:
    """Return when a row was answered, or None if the row has no time."""
    if (text := row.get("time")) is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"time is {text!r}, not like 2026-11-26T08:00+00:00") from None
