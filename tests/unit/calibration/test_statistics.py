"""Paired tests, calibration error and counts, against published values and plain loops."""

import json
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import minimize_scalar

from calibration.statistics import NUM_BINS, ModeTally, Paired, Reliability, Tally
from models.ensemble import top_k
from models.record import Z95, wilson_interval

BOUNDED = settings(max_examples=100, deadline=None, database=None)
RIGHT = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)
NUM_CLASSES = 7
LABELS = tuple("abcdefg")
# Few different values: rows full of ties.
TIED = st.sampled_from([0.0, 0.125, 0.25, 0.5])


def paired(only_first: int, only_second: int, num_images: int) -> Paired:
    found = Paired()
    first = np.zeros(num_images, bool)
    second = np.zeros(num_images, bool)
    first[:only_first] = True
    second[only_first : only_first + only_second] = True
    found.add(first, second)
    return found


def two_sided(only_first: int, only_second: int) -> float:
    """McNemar's exact test as textbooks have it: twice the smaller tail of a fair coin."""
    total = only_first + only_second
    tail = sum(comb(total, k) for k in range(min(only_first, only_second) + 1)) / 2**total
    return min(1.0, 2 * tail)


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """ECE by its definition: over the bins, the share of images times |accuracy - confidence|."""
    total = 0.0
    for index in range(NUM_BINS):
        inside = [
            i for i, c in enumerate(confidence) if min(int(c * NUM_BINS), NUM_BINS - 1) == index
        ]
        if inside:
            gap = np.mean([right[i] for i in inside]) - np.mean([confidence[i] for i in inside])
            total += len(inside) / len(confidence) * abs(gap)
    return total


@BOUNDED
@given(batches=st.lists(RIGHT, min_size=1, max_size=4))
def test_a_pair_counts_who_alone_was_right_over_all_batches(batches):
    found = Paired()
    for batch in batches:
        first, second = (np.array(column) for column in zip(*batch, strict=True))
        found.add(first, second)
    images = [image for batch in batches for image in batch]
    assert found.num_images == len(images)
    assert found.only_first == images.count((True, False))
    assert found.only_second == images.count((False, True))
    accuracies = [sum(column) / len(images) for column in zip(*images, strict=True)]
    assert found.difference == pytest.approx(accuracies[0] - accuracies[1])
    low, high = found.interval
    assert -1 <= low < high <= 1


def likelihood(share: float, difference: float, pair: Paired) -> float:
    """Return minus the log-likelihood of the counts, if only the second is right in ``share``."""
    b, c, same = pair.only_first, pair.only_second, pair.num_images - pair.only_first
    shares = (share + difference, share, 1 - 2 * share - difference)
    counts = (b, c, same - c)
    return -sum(n * np.log(max(p, 1e-300)) for n, p in zip(counts, shares, strict=True) if n)


@BOUNDED
@given(only_first=st.integers(0, 40), only_second=st.integers(0, 40), num_same=st.integers(1, 2000))
def test_the_ends_of_a_difference_are_where_tangos_score_test_rejects(
    only_first, only_second, num_same
):
    """With the nuisance share by a search for the largest likelihood, not by its formula."""
    pair = paired(only_first, only_second, only_first + only_second + num_same)
    n = pair.num_images
    for end in pair.interval:
        low, high = max(0.0, -end), (1 - end) / 2
        share = minimize_scalar(
            likelihood, bounds=(low, high), args=(end, pair), options={"xatol": 1e-10}
        ).x
        variance = 2 * share + end - end**2
        squared = (pair.difference - end) ** 2
        assert squared == pytest.approx(Z95**2 * variance / n, rel=2e-3, abs=1e-9)


@pytest.mark.parametrize("num_images", [1, 50, 1451, 100_000])
def test_no_differences_leave_room_for_what_so_few_images_would_not_show(num_images):
    expected = Z95**2 / (num_images + Z95**2)
    assert paired(0, 0, num_images).interval == pytest.approx((-expected, expected))


@BOUNDED
@given(only_first=st.integers(0, 30), only_second=st.integers(0, 30), num_same=st.integers(0, 99))
def test_the_other_way_round_is_mirrored(only_first, only_second, num_same):
    n = max(1, only_first + only_second + num_same)
    low, high = paired(only_first, only_second, n).interval
    assert paired(only_second, only_first, n).interval == pytest.approx((-high, -low), abs=1e-9)


def test_an_interval_stays_within_what_a_difference_can_be():
    assert paired(1, 0, 1).interval[1] == 1
    assert paired(0, 1, 1).interval[0] == -1


@BOUNDED
@given(only_first=st.integers(0, 60), only_second=st.integers(0, 60))
def test_mcnemar_is_twice_the_smaller_tail(only_first, only_second):
    found = paired(only_first, only_second, only_first + only_second + 1)
    assert found.p_value == pytest.approx(two_sided(only_first, only_second), abs=1e-12)


def test_mcnemar_of_one_side_only():
    assert paired(5, 0, 100).p_value == pytest.approx(2 / 2**5)
    assert paired(0, 6, 100).p_value == pytest.approx(2 / 2**6)
    assert type(paired(5, 0, 100).p_value) is float  # JSON takes no numpy


@BOUNDED
@given(data=st.data(), num_images=st.integers(1, 40), num_batches=st.integers(1, 3))
def test_the_calibration_error_is_that_of_a_plain_loop(data, num_images, num_batches):
    shape = num_batches, num_images
    confidence = data.draw(hnp.arrays(np.float32, shape, elements=st.floats(0, 1, width=32)))
    right = data.draw(hnp.arrays(np.bool_, shape))
    found = Reliability()
    for some, of_these in zip(confidence, right, strict=True):
        found.add(some, of_these)
    assert found.counts.sum() == confidence.size
    assert found.right.sum() == right.sum()
    expected = calibration_error(confidence.ravel(), right.ravel())
    assert found.expected_calibration_error == pytest.approx(expected, abs=1e-6)


def test_the_last_bin_has_what_rounds_above_one_and_no_images_no_error():
    found = Reliability()
    found.add(np.array([1.0000001], np.float32), np.array([True]))
    assert found.counts[-1] == 1
    assert Reliability().expected_calibration_error == 0


@st.composite
def answers(draw, max_images: int = 12) -> tuple[np.ndarray, np.ndarray]:
    num_images = draw(st.integers(1, max_images))
    elements = draw(st.sampled_from([TIED, st.floats(0, 1, width=32)]))
    rows = draw(hnp.arrays(np.float32, (num_images, NUM_CLASSES), elements=elements))
    return rows, draw(hnp.arrays(np.int64, num_images, elements=st.integers(0, NUM_CLASSES - 1)))


def tally_of(rows: list[list[float]], truth: list[int]) -> Tally:
    found = Tally(len(rows[0]))
    found.add(np.array(rows, np.float32), np.array(truth, np.int64))
    return found


@BOUNDED
@given(batches=st.lists(answers(), min_size=1, max_size=3))
def test_counts_are_those_of_a_loop_that_sorts_as_serving_does(batches):
    found = Tally(NUM_CLASSES)
    said = [found.add(rows, truth) for rows, truth in batches]
    images = [image for batch in batches for image in zip(*batch, strict=True)]
    ranked = [[p.index for p in top_k(row, LABELS, 5)] for row, _ in images]
    truth = [int(t) for _, t in images]
    first = [order[0] for order in ranked]
    is_right = [a == t for a, t in zip(first, truth, strict=True)]
    assert np.concatenate(said).tolist() == is_right
    assert found.num_images == len(images)
    assert found.num_right == sum(is_right)
    assert found.num_right_top5 == sum(t in order for t, order in zip(truth, ranked, strict=True))
    confusion = np.zeros((NUM_CLASSES, NUM_CLASSES), int)
    for t, a in zip(truth, first, strict=True):
        confusion[t, a] += 1
    assert (found.confusion == confusion).all()


@BOUNDED
@given(batch=answers(), cut=st.integers(0, 12))
def test_how_the_images_are_cut_into_batches_changes_nothing_tally(batch, cut):
    rows, truth = batch
    whole, parts = Tally(NUM_CLASSES), Tally(NUM_CLASSES)
    whole.add(rows, truth)
    for part in (slice(None, cut), slice(cut, None)):
        parts.add(rows[part], truth[part])
    assert parts.score == whole.score
    assert parts.class_accuracy() == whole.class_accuracy()


def test_the_top_five_are_the_first_of_equals_or_all_there_are():
    found = tally_of([[1 / 7] * 7] * 7, list(range(7)))
    assert (found.num_right_top5, found.num_right) == (5, 1)
    assert tally_of([[0.9, 0.1, 0.0]], [2]).score.top5 == 1


def test_confidence_is_of_any_answer_and_no_images_are_no_accuracy():
    found = tally_of([[0.9, 0.1], [0.2, 0.8]], [0, 0])
    assert found.reliability.confidence.sum() == pytest.approx(1.7)
    assert found.reliability.right.sum() == 1
    found = tally_of([[0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.1, 0.8, 0.1]], [0, 0, 2])
    assert found.class_accuracy() == [0.5, None, 0.0]
    assert all(type(v) is float for v in found.class_accuracy() if v is not None)


def test_the_score_is_rounded_and_fit_for_json():
    score = tally_of([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]], [0, 0, 1]).score
    assert score.top1 == 0.6667
    assert score.top1_interval == tuple(round(v, 4) for v in wilson_interval(2, 3))
    assert score.top5 == 1
    assert score.calibration_error == pytest.approx(0.9 - 2 / 3, abs=1e-4)
    assert json.loads(json.dumps(score.model_dump(mode="json")))["top1"] == 0.6667


def test_a_mode_counts_sure_answers_from_its_bound_on_and_what_its_sets_hold():
    tally = ModeTally(0.8, 0.2)
    rows = np.array([[0.8, 0.2], [0.79, 0.21], [0.1, 0.9], [0.05, 0.95]], np.float32)
    tally.add(rows[:3], np.array([0, 0, 0]))
    tally.add(rows[3:], np.array([1]))
    tally.add(rows[:0], np.array([], np.int64))
    low, high = (round(bound, 4) for bound in wilson_interval(2, 3))
    sure = {"from": 0.8, "share": 0.75, "right": 0.6667, "right_interval": [low, high]}
    sets = {"from": 0.2, "coverage": 0.75, "mean_size": 1.5}
    assert tally.figures() == {"num_images": 4, "top1": 0.75, "sure": sure, "answer_set": sets}


def test_a_mode_without_bounds_or_images_says_so():
    none = {"num_images": 0, "top1": None, "sure": None, "answer_set": None}
    assert ModeTally(0.8, 0.2).figures() == ModeTally(None, None).figures() == none
    nobody = ModeTally(0.99, None)
    nobody.add(np.array([[0.8, 0.2]], np.float32), np.array([0]))
    assert nobody.figures()["sure"] == {
        "from": 0.99,
        "share": 0.0,
        "right": None,
        "right_interval": [],
    }
