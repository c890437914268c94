"""Tests whether two sets of answers differ in classes, confidence or the members' agreement.

A difference is drift if it is statistically significant and its effect size reaches a bound. With
many images the smallest difference is significant; with few, large ones arise by chance.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import asin, sqrt

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2_contingency, false_discovery_control, fisher_exact, ks_2samp

from calibration.drift.answers import Answers
from models.errors import ModelSetError

LEVEL = 0.05  # false discovery rate of the three tests (Benjamini and Hochberg 1995)
MIN_IMAGES = 50  # on each side: with fewer, only extreme differences are significant
MIN_EXPECTED = 5.0  # images of a class on either side, for the chi-squared test (Cochran 1954)
NUM_DRAWN = 1999  # random divisions, in place of that test where a class has fewer images
MAX_SQUARE = 4.0  # the distance of :func:`_square` between sides that share no class
# Cohen's (1988) bounds of a small effect; Kolmogorov and Smirnov's D has none, 0.1 is our choice.
BOUNDS = {"classes": 0.1, "confidence": 0.1, "agreement": 0.2}


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

    differences: tuple[Difference, ...]
    classes: tuple[ClassShare, ...]  # all labels on either side, the largest change first

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
            f"--model-set, or make a reference: tandem classify --offline --model-set {names[1]}"
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
    adjusted = false_discovery_control([test.p_value for test in tests])
    differences = (
        replace(test, adjusted_p=float(p)) for test, p in zip(tests, adjusted, strict=True)
    )
    return Drift(tuple(differences), shares)


def class_shares(reference: tuple[str, ...], samples: tuple[str, ...]) -> tuple[ClassShare, ...]:
    """Return the share of each label on either side, the largest change first."""
    before, now = Counter(reference), Counter(samples)
    shares = [
        ClassShare(
            label,
            before[label],
            now[label],
            before[label] / len(reference),
            now[label] / len(samples),
        )
        for label in before.keys() | now.keys()
    ]
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
    effect = _cramers_v(float(_square(counts[1], counts)), by_chance)
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


def _cramers_v(square: float, by_chance: float) -> float:
    """Return Cramér's V, 0..1, of a distance from :func:`_square`.

    The bias is subtracted first: ``by_chance`` is the mean distance between sides without a
    difference (Bergsma 2013, Journal of the Korean Statistical Society 42).
    """
    most = MAX_SQUARE - by_chance
    return sqrt(min(1.0, max(0.0, square - by_chance) / most)) if most > 0 else 0.0


def _confidence(reference: Answers, samples: Answers) -> Difference:
    """Test the first class's probability with the two-sample Kolmogorov-Smirnov test."""
    result = ks_2samp(reference.confidence, samples.confidence)
    means = (float(answers.confidence.mean()) for answers in (reference, samples))
    distance = float(result.statistic)
    return Difference(
        "confidence",
        "Kolmogorov-Smirnov",
        distance,
        float(result.pvalue),
        "D",
        distance,
        BOUNDS["confidence"],
        *means,
    )


def _agreement(reference: Answers, samples: Answers) -> Difference:
    """Test the share of images on which all members agree with Fisher's exact test."""
    agreed = [int(answers.agreement.sum()) for answers in (reference, samples)]
    nums = [reference.num, samples.num]
    table = [[count, num - count] for count, num in zip(agreed, nums, strict=True)]
    result = fisher_exact(table)
    shares = [count / num for count, num in zip(agreed, nums, strict=True)]
    first, second = (2 * asin(sqrt(share)) for share in shares)
    return Difference(
        "agreement",
        "Fisher's exact",
        shares[1] - shares[0],
        float(result.pvalue),
        "Cohen's h",
        abs(second - first),
        BOUNDS["agreement"],
        *shares,
    )
